# The learner for Ascend NPUs: CANN from the base image, torch and torch_npu of one version; the driver is the node's.
# Build from the repository's root: scripts/build_images learner-npu, or learner-npu-a3 for Atlas A3
ARG CHIP=
ARG BASE=quay.io/ascend/cann:9.1.0-${CHIP:-910b}-ubuntu22.04-py3.11

FROM ${BASE} AS build
ARG UV=0.13.9
RUN python3 -m venv /uv && /uv/bin/pip install --no-cache-dir uv==${UV}
ENV VIRTUAL_ENV=/opt/kestrl UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1 UV_SYSTEM_CERTS=1
WORKDIR /src
# All of the lock but torch, then torch from its own index: the build for CPUs, without CUDA's gigabytes. Its version, and those of
# all that it needs, are the lock's too.
COPY pyproject.toml uv.lock ./
ARG TORCH_BACKEND=cpu
RUN export="/uv/bin/uv export --frozen --no-default-groups --no-emit-workspace --package kestrl-learner --package kestrl-email --extra postgres" \
 && $export --quiet --prune torch --output-file /rest.txt \
 && $export --quiet --no-hashes --output-file /lock.txt \
 && /uv/bin/uv venv --python python3.11 --system-site-packages /opt/kestrl \
 && /uv/bin/uv pip install --no-deps --require-hashes --requirements /rest.txt \
 && /uv/bin/uv pip install ${TORCH_BACKEND:+--torch-backend ${TORCH_BACKEND}} --constraints /lock.txt torch
# torch_npu is made for one version of torch: another torch in the lock asks for another torch_npu here.
ARG TORCH_NPU=2.13.0
RUN /uv/bin/uv pip install --constraints /lock.txt torch-npu==${TORCH_NPU}
COPY wheels /wheels
RUN /uv/bin/uv pip install --no-index --find-links /wheels 'kestrl-learner[postgres]' kestrl-email

FROM ${BASE}
ARG VERSION=unknown
LABEL org.opencontainers.image.title="kestrl-learner-npu" \
      org.opencontainers.image.description="KestRL's learner, for Ascend NPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Process 1: it reaps orphans and passes signals on. A base of one's own may have it.
RUN command -v catatonit || (apt-get update && apt-get install --yes --no-install-recommends catatonit && rm -rf /var/lib/apt/lists/*)
# Some libraries ask for the user's name, so the user that pods run as has one.
RUN groupadd --gid 10001 kestrl && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp kestrl
COPY --from=build /opt/kestrl /opt/kestrl
ENV PATH=/opt/kestrl/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GOMP_SPINCOUNT=2000
USER 10001:10001
ENTRYPOINT ["catatonit", "--", "python", "-m", "kestrl_learner"]
