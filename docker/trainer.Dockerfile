# The image that training jobs on Cloud TPU v5e start from. From the project's folder, with your
# registry for IMAGE:
#     docker build --platform linux/amd64 -f docker/trainer.Dockerfile -t IMAGE . && docker push IMAGE
FROM python:3.11-slim-bookworm

# Without the extra `train`: tensorflow-transform is built for TensorFlow 2.21, and training reads
# what it leaves, a SavedModel, without it. All at once, so that pip holds one against the other.
COPY docker/trainer-requirements.txt setup.py pyproject.toml MANIFEST.in LICENSE README.md constraints.txt /tmp/tpufeed/
COPY pipeline /tmp/tpufeed/pipeline
COPY transforms /tmp/tpufeed/transforms
RUN pip install --no-cache-dir -c /tmp/tpufeed/constraints.txt \
        -r /tmp/tpufeed/trainer-requirements.txt /tmp/tpufeed \
    && rm -r /tmp/tpufeed

# TensorFlow finds the TPU through PJRT: these must be set before it is imported. On a machine
# without a TPU they make the import crash, so nothing is imported while the image is built.
ENV PJRT_DEVICE=TPU \
    NEXT_PLUGGABLE_DEVICE_USE_C_API=true \
    TF_PLUGGABLE_DEVICE_LIBRARY_PATH=/usr/local/lib/python3.11/site-packages/libtpu/libtpu.so
RUN test -f "$TF_PLUGGABLE_DEVICE_LIBRARY_PATH" && tpufeed --version

ENTRYPOINT ["tpufeed", "train"]
