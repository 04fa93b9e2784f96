# The teacher's image: vLLM (CUDA), Ray and the pipeline. Head, workers and the submitter of a RayJob all run it.
#
#   docker build -f deploy/images/teacher.Dockerfile -t registry.example/teachercache-teacher:0.1.0 .
#
# Ubuntu 24.04 brings Python 3.12, which constraints/cuda.txt was measured with. The CUDA libraries come as wheels with
# torch; from NVIDIA's base image we need the driver's contract alone, so `base` does and `devel` (4 GB more) is not used.
ARG CUDA_IMAGE=nvidia/cuda:13.0.3-base-ubuntu24.04

FROM ${CUDA_IMAGE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# Dependencies first: they are 8 GB and change rarely, our code is small and changes often.
COPY pyproject.toml README.md LICENSE ./
COPY constraints/cuda.txt constraints/
# The version is read from teachercache/__init__.py; here any will do.
RUN mkdir teachercache pipeline trainer \
    && touch pipeline/__init__.py trainer/__init__.py \
    && echo '__version__ = "0"' > teachercache/__init__.py \
    && pip install -c constraints/cuda.txt ".[pipeline,vllm,hub]" \
    && pip uninstall -y teachercache
COPY teachercache teachercache
COPY pipeline pipeline
COPY trainer trainer
RUN pip install --no-deps .

FROM ${CUDA_IMAGE} AS runtime
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# gcc and Python's headers: triton and torch.compile build small launchers at run time.  wget: KubeRay's health probes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev gcc libc6-dev libnuma1 wget ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && userdel --remove ubuntu \
    && useradd --uid 1000 --create-home --shell /bin/bash ray \
    && install -d -o ray -g ray /models /etc/teachercache
COPY --from=build /opt/venv /opt/venv
# DL3064 takes TOKENIZERS_PARALLELISM for a secret.
# hadolint ignore=DL3064
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models/hub \
    VLLM_CACHE_ROOT=/home/ray/.cache/vllm \
    VLLM_NO_USAGE_STATS=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    TOKENIZERS_PARALLELISM=false
USER 1000
WORKDIR /etc/teachercache
CMD ["python", "-m", "pipeline", "--help"]
