# trialflow in an image: what a Docker or Kubernetes work pool runs.
#
#   docker build -t trialflow .                             # CPU
#   docker build -t trialflow . \
#     --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128
#
# CUDA needs a `devel` base: DeepSpeed compiles its operators when they are first used. A trial's code
# comes with an image of its own:
#
#   FROM trialflow
#   COPY my_trial /home/trialflow/my_trial
ARG BASE=debian:bookworm-slim
# hadolint ignore=DL3006
FROM ${BASE}

# The versions of these are the base's.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ python3 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 trialflow \
    # Where runs lock GPUs: a volume that containers share takes its permissions from here.
    && mkdir --mode=1777 /var/lib/trialflow-devices

RUN python3 -m venv /opt/trialflow
ENV PATH=/opt/trialflow/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PREFECT_SERVER_ANALYTICS_ENABLED=false

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=obstore,gcs,azure
WORKDIR /tmp/trialflow
COPY constraints.txt ./
# Alone, so that a change of our code does not fetch the biggest package again.
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY trial_core trial_core
COPY tasks tasks
COPY flows flows
COPY deployments deployments
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c constraints.txt ".[${EXTRAS}]"

# By number, so that Kubernetes can see that it is not root.
USER 10001
WORKDIR /home/trialflow

# tini hands signals on to the flow, which saves then, and buries ranks that have died.
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["trialflow", "--help"]
