# One image for all services: the command says which, `pdmesh-gateway`, `pdmesh-prefill`, ...
#   docker build -t pdmesh:sim .                            the simulated engine; small
#   docker build -t pdmesh:vllm --build-arg ENGINE=vllm .   vLLM on CPU, and PyTorch with it
#   docker build -t pdmesh:vllm-cuda --build-arg ENGINE=vllm-cuda .   vLLM on CUDA GPUs (docs/gpu.md); 16 GB, and no RDMA in its UCX
ARG ENGINE=sim
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS python

# Dependencies in a virtual environment, which is all that the final image takes over.
FROM python AS deps-sim
WORKDIR /build
RUN python -m venv /opt/pdmesh
COPY requirements/install.sh requirements/base.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip requirements/install.sh /opt/pdmesh base

# Wheels that the package index does not have: docker build --build-context wheels=FOLDER
FROM scratch AS wheels

FROM deps-sim AS deps-vllm
COPY requirements/vllm.txt requirements/torch.txt requirements/model.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,from=wheels,target=/wheels \
    PIP_FIND_LINKS=/wheels requirements/install.sh /opt/pdmesh vllm

FROM deps-sim AS deps-vllm-cuda
COPY requirements/vllm-cuda.txt requirements/model.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip requirements/install.sh /opt/pdmesh cuda

FROM deps-sim AS wheel
COPY pyproject.toml README.md LICENSE ./
COPY libs libs
COPY services services
RUN /opt/pdmesh/bin/pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /wheel .

# What both images have in common: the user, and where things listen inside a container.
FROM python AS runtime
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin pdmesh
ENV PATH=/opt/pdmesh/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PDMESH_HOST=0.0.0.0 \
    PDMESH_INNER_HOST=0.0.0.0 \
    PDMESH_STATE_DIR=/tmp/pdmesh \
    PDMESH_LOG_FORMAT=json \
    PDMESH_GATEWAY_HTTP_PORT=8000 \
    PDMESH_GATEWAY_GRPC_PORT=8001 \
    PDMESH_GATEWAY_OPS_PORT=9100 \
    PDMESH_MASTER_SCHEDULER_OPS_PORT=9100 \
    PDMESH_KV_CACHE_INDEX_OPS_PORT=9100 \
    PDMESH_HEALTH_MONITOR_OPS_PORT=9100 \
    PDMESH_PREFILL_OPS_PORT=9100 \
    PDMESH_DECODE_OPS_PORT=9100 \
    PDMESH_INSTANCE_OPS_PORT=9100 \
    PDMESH_NODE_AGENT_OPS_PORT=9100 \
    PDMESH_HEALTHCHECK_PORT=9100
COPY deploy/docker/healthcheck /usr/local/bin/pdmesh-healthcheck
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --start-interval=500ms --retries=3 \
    CMD ["pdmesh-healthcheck"]
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000 8001 9100
CMD ["pdmesh-gateway"]

FROM runtime AS runtime-sim
ENV PDMESH_ENGINE=sim PDMESH_MODEL_DIR=/opt/models/sim

FROM runtime AS runtime-vllm
USER root
# vLLM's kernels load it; no wheel brings it.
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
ENV PDMESH_ENGINE=vllm PDMESH_MODEL_DIR=/opt/models/SmolLM2-135M-Instruct \
    HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_DO_NOT_TRACK=1
# Loading takes tens of seconds on a busy machine.
HEALTHCHECK --interval=5s --timeout=3s --start-period=600s --start-interval=1s --retries=3 \
    CMD ["pdmesh-healthcheck"]

FROM runtime-vllm AS runtime-vllm-cuda
# Triton compiles the launchers of its kernels. The driver comes from the host, by NVIDIA's container toolkit.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The model is part of the image, so that a container needs neither a network nor a volume to start.
FROM deps-sim AS model-sim
COPY libs libs
RUN PYTHONPATH=libs /opt/pdmesh/bin/python -c \
    'import pathlib, pdmesh.engine.sim_tokenizer as m; m.write_sim_model(pathlib.Path("/opt/models/sim"))'

FROM deps-vllm AS model-vllm
COPY libs/pdmesh/models/smollm2.py .
RUN /opt/pdmesh/bin/python smollm2.py /opt/models/SmolLM2-135M-Instruct

FROM deps-vllm-cuda AS model-vllm-cuda
COPY libs/pdmesh/models/smollm2.py .
RUN /opt/pdmesh/bin/python smollm2.py /opt/models/SmolLM2-135M-Instruct

FROM deps-${ENGINE} AS deps
COPY deploy/docker/slim-venv .
RUN ./slim-venv /opt/pdmesh

FROM model-${ENGINE} AS model

FROM runtime-${ENGINE}
COPY --from=deps /opt/pdmesh /opt/pdmesh
COPY --from=model /opt/models /opt/models
USER root
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip --python /opt/pdmesh/bin/python install --no-deps --no-index --no-cache-dir /wheel/*.whl
USER 10001:10001
