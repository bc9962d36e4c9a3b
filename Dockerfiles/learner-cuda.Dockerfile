# The learner for NVIDIA GPUs: torch as PyPI has it, with CUDA's libraries; the driver is the node's.
# Build from the repository's root: scripts/build_images learner-cuda
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${BASE} AS build
ARG UV=0.13.9
RUN python3 -m venv /uv && /uv/bin/pip install --no-cache-dir uv==${UV}
ENV UV_PROJECT_ENVIRONMENT=/opt/kestrl UV_PYTHON=python3.11 UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy \
    UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1 UV_SYSTEM_CERTS=1
WORKDIR /src
# First what others wrote: this layer stays when only our code changes.
COPY pyproject.toml uv.lock ./
RUN /uv/bin/uv sync --frozen --no-default-groups --no-install-workspace --package kestrl-learner --package kestrl-email --extra postgres
COPY wheels /wheels
RUN /uv/bin/uv pip install --python /opt/kestrl --no-index --find-links /wheels 'kestrl-learner[postgres]' kestrl-email

FROM ${BASE}
ARG VERSION=unknown
LABEL org.opencontainers.image.title="kestrl-learner-cuda" \
      org.opencontainers.image.description="KestRL's learner, for NVIDIA GPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Process 1: it reaps orphans and passes signals on. A base of one's own may have it.
RUN command -v catatonit || (apt-get update && apt-get install --yes --no-install-recommends catatonit && rm -rf /var/lib/apt/lists/*)
# FlexAttention and compiled layers: Triton compiles the launcher of each kernel, with the headers of Python in the base.
RUN command -v gcc || (apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*)
# Some libraries ask for the user's name, so the user that pods run as has one.
RUN groupadd --gid 10001 kestrl && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp kestrl
COPY --from=build /opt/kestrl /opt/kestrl
ENV PATH=/opt/kestrl/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GOMP_SPINCOUNT=2000
USER 10001:10001
ENTRYPOINT ["catatonit", "--", "python", "-m", "kestrl_learner"]
