# teacher service for Ascend NPUs, on CANN 9.1.0; see deploy/ascend.md. From the root of the repository:
#   docker build -f deploy/docker/teacher-ascend.Dockerfile -t eagle-pangu-teacher-ascend .
# Another chip or system is another tag of the same release: --build-arg CANN_IMAGE=quay.io/ascend/cann:9.1.0-a3-...
# On x86-64 torch's small CPU wheel may need an index of its own: --build-arg PIP_EXTRA_INDEX_URL=... (else CUDA comes along).
ARG CANN_IMAGE=quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.12

FROM ${CANN_IMAGE} AS build
ARG PIP_EXTRA_INDEX_URL
WORKDIR /source
RUN python3 -m venv /opt/eagle-pangu
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY protos protos
COPY eagle_pangu eagle_pangu
COPY teacher_service teacher_service
# torch's version is that of torch_npu, which the npu extra names.
RUN sed '/^torch==/d' constraints.txt > ascend-constraints.txt
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/eagle-pangu/bin/pip install --constraint ascend-constraints.txt ".[npu]"

FROM ${CANN_IMAGE}
COPY --from=build /opt/eagle-pangu /opt/eagle-pangu
COPY --chmod=755 deploy/docker/with-cann.sh /opt/eagle-pangu/bin/with-cann
ENV PATH=/opt/eagle-pangu/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
    EAGLE_PANGU_HOME=/var/lib/eagle-pangu
# CANN writes its logs and what it compiles below the home and the working directory.
WORKDIR /tmp
USER 10001:10001
EXPOSE 50051
ENTRYPOINT ["with-cann", "eagle-pangu-teacher"]
