# The inference engine for Ascend NPUs: vllm-ascend's own image, and what of KestRL runs in it.
# Build from the repository's root: scripts/build_images engine-npu, or engine-npu-a3 for Atlas A3
ARG CHIP=
ARG BASE=quay.io/ascend/vllm-ascend:v0.23.0${CHIP:+-${CHIP}}

FROM ${BASE}
ARG VERSION=unknown
LABEL org.opencontainers.image.title="kestrl-engine-npu" \
      org.opencontainers.image.description="vLLM on Ascend NPUs behind KestRL's guard" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 0
# Process 1: it reaps orphans and passes signals on. A base of one's own may have it.
RUN command -v catatonit || (apt-get update && apt-get install --yes --no-install-recommends catatonit && rm -rf /var/lib/apt/lists/*)
# Some libraries ask for the user's name, so the user that pods run as has one. Pods start `python`, which not every base has.
RUN groupadd --gid 10001 kestrl && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp kestrl \
 && (command -v python || ln -s "$(command -v python3)" /usr/local/bin/python)
# Launcher, guard and plugin need what the engine has, so nothing of its own environment is touched; it finds the plugin by the metadata.
COPY services/inference/src/kestrl_inference/__init__.py /opt/kestrl/kestrl_inference/
COPY services/inference/src/kestrl_inference/inside /opt/kestrl/kestrl_inference/inside
RUN info=/opt/kestrl/kestrl_inference-0.dist-info && mkdir "$info" \
 && printf 'Metadata-Version: 2.4\nName: kestrl-inference\nVersion: 0\n' >"$info/METADATA" \
 && printf '[vllm.general_plugins]\nkestrl = kestrl_inference.inside.vllm_plugin:register\n\n' >"$info/entry_points.txt" \
 && printf '[sglang.srt.plugins]\nkestrl = kestrl_inference.inside.sglang_plugin:register\n' >>"$info/entry_points.txt"
ENV PYTHONPATH=/opt/kestrl${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GOMP_SPINCOUNT=2000
USER 10001:10001
ENTRYPOINT ["catatonit", "--", "python", "-m", "kestrl_inference.inside.launcher"]
