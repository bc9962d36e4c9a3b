# The inference engine for CPUs: vLLM, and the guard before its control routes.
# Build from the repository's root: scripts/build_images engine-cpu
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${BASE} AS build
ARG UV=0.13.9
RUN python3 -m venv /uv && /uv/bin/pip install --no-cache-dir uv==${UV}
ENV VIRTUAL_ENV=/opt/engine UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1 UV_SYSTEM_CERTS=1
WORKDIR /src
# All of the lock of `kestrl engine install` but torch, then torch from its own index: the build for CPUs, without CUDA's gigabytes.
# Its version, and those of all that it needs, are the lock's too.
COPY src/kestrl/_app/engines/locks/vllm-0.32.0-cpu.txt /lock.txt
ARG TORCH_BACKEND=cpu
RUN awk '/^[^ ]/ {kept = !/^(torch|triton|nvidia-[^=]*|cuda-[^=]*)==/} kept' /lock.txt >/rest.txt \
 && sed -n '/^[^ ]/s/ \\$//p' /lock.txt >/versions.txt \
 && /uv/bin/uv venv --python python3.11 /opt/engine \
 && /uv/bin/uv pip install --no-deps --require-hashes --requirements /rest.txt \
 && /uv/bin/uv pip install ${TORCH_BACKEND:+--torch-backend ${TORCH_BACKEND}} --constraints /versions.txt torch

FROM ${BASE}
ARG VERSION=unknown
LABEL org.opencontainers.image.title="kestrl-engine-cpu" \
      org.opencontainers.image.description="vLLM on CPUs behind KestRL's guard" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# vLLM's kernels are linked to it.
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
# Process 1: it reaps orphans and passes signals on. A base of one's own may have it.
RUN command -v catatonit || (apt-get update && apt-get install --yes --no-install-recommends catatonit && rm -rf /var/lib/apt/lists/*)
# Some libraries ask for the user's name, so the user that pods run as has one.
RUN groupadd --gid 10001 kestrl && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp kestrl
COPY --from=build /opt/engine /opt/engine
# Launcher, guard and plugin need what the engine has; it finds the plugin by the metadata.
COPY services/inference/src/kestrl_inference/__init__.py /opt/kestrl/kestrl_inference/
COPY services/inference/src/kestrl_inference/inside /opt/kestrl/kestrl_inference/inside
RUN info=/opt/kestrl/kestrl_inference-0.dist-info && mkdir "$info" \
 && printf 'Metadata-Version: 2.4\nName: kestrl-inference\nVersion: 0\n' >"$info/METADATA" \
 && printf '[vllm.general_plugins]\nkestrl = kestrl_inference.inside.vllm_plugin:register\n\n' >"$info/entry_points.txt" \
 && printf '[sglang.srt.plugins]\nkestrl = kestrl_inference.inside.sglang_plugin:register\n' >>"$info/entry_points.txt"
ENV PATH=/opt/engine/bin:$PATH PYTHONPATH=/opt/kestrl PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GOMP_SPINCOUNT=2000
USER 10001:10001
ENTRYPOINT ["catatonit", "--", "python", "-m", "kestrl_inference.inside.launcher"]
