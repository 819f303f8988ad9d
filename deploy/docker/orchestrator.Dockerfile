# orchestrator service. From the root of the repository:  docker build -f deploy/docker/orchestrator.Dockerfile -t eagle-pangu-orchestrator .
# No torch: the base dependencies only.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
WORKDIR /source
RUN python -m venv /opt/eagle-pangu
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY protos protos
COPY eagle_pangu eagle_pangu
COPY orchestrator orchestrator
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/eagle-pangu/bin/pip install --constraint constraints.txt .

FROM python:${PYTHON_VERSION}-slim
COPY --from=build /opt/eagle-pangu /opt/eagle-pangu
ENV PATH=/opt/eagle-pangu/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
USER 10001:10001
EXPOSE 50050
ENTRYPOINT ["eagle-pangu-orchestrator"]
