# The image that training jobs on Cloud TPU start from. From the project's folder, with your registry
# for IMAGE:
#     docker build --platform linux/amd64 -f docker/trainer.Dockerfile -t IMAGE . && docker push IMAGE
FROM python:3.11-slim-bookworm

# tensorflow-tpu ends at 2.20. tensorflow-transform is built for 2.21, and training does not need it.
COPY docker/trainer-requirements.txt /tmp/tpufeed/requirements.txt
RUN pip install --no-cache-dir -r /tmp/tpufeed/requirements.txt

COPY setup.py pyproject.toml MANIFEST.in LICENSE README.md /tmp/tpufeed/
COPY pipeline /tmp/tpufeed/pipeline
COPY transforms /tmp/tpufeed/transforms
ENTRYPOINT ["tpufeed", "train"]
