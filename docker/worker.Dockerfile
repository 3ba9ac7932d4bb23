# The image that Dataflow workers start from, so that they install nothing as they boot. It is also
# the launcher of the Flex Template. From the project's folder, with your registry for IMAGE:
#     docker build --platform linux/amd64 -f docker/worker.Dockerfile -t IMAGE . && docker push IMAGE
FROM gcr.io/dataflow-templates-base/python311-template-launcher-base AS launcher

# Beam's version and Python's are those of constraints.txt and of what submits the job.
FROM apache/beam_python3.11_sdk:2.77.0

COPY setup.py pyproject.toml MANIFEST.in LICENSE README.md constraints.txt /tmp/tpufeed/
COPY pipeline /tmp/tpufeed/pipeline
COPY transforms /tmp/tpufeed/transforms
# Imported at once, so that an image that lacks something is never pushed.
RUN pip install --no-cache-dir -c /tmp/tpufeed/constraints.txt /tmp/tpufeed \
    && rm -r /tmp/tpufeed \
    && cd / && python -c 'import pipeline.ingest'

COPY --from=launcher /opt/google/dataflow/python_template_launcher /opt/google/dataflow/python_template_launcher
COPY docker/flex_template.py /template/main.py
ENV FLEX_TEMPLATE_PYTHON_PY_FILE=/template/main.py
# The entry point stays Beam's: it starts the worker.
