# The trainer's image: torch (CUDA), triton, transformers and the trainer. No Ray and no vLLM: half the teacher's size.
#
#   docker build -f deploy/images/trainer.Dockerfile -t registry.example/teachercache-trainer:0.1.0 .
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
COPY pyproject.toml README.md LICENSE ./
COPY constraints/cuda.txt constraints/
# The version is read from teachercache/__init__.py; here any will do.
RUN mkdir teachercache pipeline trainer \
    && touch pipeline/__init__.py trainer/__init__.py \
    && echo '__version__ = "0"' > teachercache/__init__.py \
    && pip install -c constraints/cuda.txt ".[trainer,fast,hub]" \
    && pip uninstall -y teachercache
COPY teachercache teachercache
COPY pipeline pipeline
COPY trainer trainer
RUN pip install --no-deps .

FROM ${CUDA_IMAGE} AS runtime
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev gcc libc6-dev ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && userdel --remove ubuntu \
    && useradd --uid 1000 --create-home --shell /bin/bash trainer \
    && install -d -o trainer -g trainer /models /output /etc/teachercache
COPY --from=build /opt/venv /opt/venv
# DL3064 takes TOKENIZERS_PARALLELISM for a secret.
# hadolint ignore=DL3064
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models/hub \
    TRITON_CACHE_DIR=/home/trainer/.cache/triton \
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
    TOKENIZERS_PARALLELISM=false
USER 1000
WORKDIR /etc/teachercache
CMD ["python", "-m", "trainer", "--help"]
