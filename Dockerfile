# The image that a Docker or Kubernetes work pool runs.
#
#   docker build -t trialflow .                             # CPU
#   docker build -t trialflow . \
#     --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128
#
# CUDA needs a `devel` base: DeepSpeed compiles its operators on their first use. A trial's code is
# added in another image:
#
#   FROM trialflow
#   COPY my_trial /home/trialflow/my_trial
ARG BASE=debian:bookworm-slim
# hadolint ignore=DL3006
FROM ${BASE}

# The base image decides the versions of these packages.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ python3 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 trialflow \
    # The folder of GPU locks. A volume mounted here, shared by containers, takes its permissions.
    && mkdir --mode=1777 /var/lib/trialflow-devices

RUN python3 -m venv /opt/trialflow
ENV PATH=/opt/trialflow/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PREFECT_SERVER_ANALYTICS_ENABLED=false

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=obstore,gcs,azure
WORKDIR /tmp/trialflow
COPY constraints.txt ./
# In a layer before our code: a change of the code does not download the biggest package again.
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY trial_core trial_core
COPY tasks tasks
COPY flows flows
COPY deployments deployments
COPY trialflow trialflow
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c constraints.txt ".[${EXTRAS}]"

# A number, so that Kubernetes can verify that the user is not root.
USER 10001
WORKDIR /home/trialflow

# tini forwards signals to the flow, which then saves, and reaps ranks that have ended.
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["trialflow", "--help"]
