# draft service. From the root of the repository:  docker build -f deploy/docker/draft.Dockerfile -t eagle-pangu-draft .
# torch's small CPU wheel may need an index of its own: --build-arg PIP_EXTRA_INDEX_URL=... (else CUDA comes along).
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
ARG PIP_EXTRA_INDEX_URL
WORKDIR /source
RUN python -m venv /opt/eagle-pangu
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY protos protos
COPY eagle_pangu eagle_pangu
COPY draft_service draft_service
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/eagle-pangu/bin/pip install --constraint constraints.txt ".[models]"

FROM python:${PYTHON_VERSION}-slim
COPY --from=build /opt/eagle-pangu /opt/eagle-pangu
ENV PATH=/opt/eagle-pangu/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false GOMP_SPINCOUNT=100000 \
    HF_HUB_OFFLINE=1 EAGLE_PANGU_HOME=/var/lib/eagle-pangu
USER 10001:10001
EXPOSE 50052
ENTRYPOINT ["eagle-pangu-draft"]
