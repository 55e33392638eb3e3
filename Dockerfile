# The image that a Docker or Kubernetes work pool runs.
#
#   docker build -t trialflow .                             # CPU
#   docker build -t trialflow . --build-arg TORCH=cu130     # NVIDIA, driver 580 or newer
#   docker build -t trialflow . --build-arg TORCH=cu126     # NVIDIA, driver 525 or newer
#
# TORCH chooses the base image and the torch build together: DeepSpeed compiles its operators on
# their first use, with the nvcc of the base image, which must be of torch's CUDA. A trial's code is
# added in another image:
#
#   FROM trialflow
#   COPY my_trial /home/trialflow/my_trial
ARG TORCH=cpu
FROM debian:bookworm-slim AS cpu
FROM nvidia/cuda:12.6.3-devel-ubuntu24.04 AS cu126
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS cu130
# hadolint ignore=DL3006
FROM ${TORCH}

# The base image decides the versions of these packages.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ libaio-dev python3 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 trialflow \
    # The folder of GPU locks. A volume mounted here, shared by containers, takes its permissions.
    && mkdir --mode=1777 /var/lib/trialflow-devices \
    # The folder of compiled operators, for a volume, which takes its owner.
    && install --directory --owner=trialflow --group=trialflow \
        /home/trialflow/.cache /home/trialflow/.cache/torch_extensions

RUN python3 -m venv /opt/trialflow
ENV PATH=/opt/trialflow/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PREFECT_SERVER_ANALYTICS_ENABLED=false

ARG TORCH
ARG TORCH_INDEX=https://download.pytorch.org/whl/${TORCH}
ARG EXTRAS=gcs,azure
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
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c constraints.txt ".[${EXTRAS}]" \
    # An image whose nvcc does not fit torch would fail in its first run.
    && python -c "import sys; from trial_core.deepspeed.op_builds import nvcc_problem as problem; sys.exit(problem())"
# A number, so that Kubernetes can verify that the user is not root.
USER 10001
WORKDIR /home/trialflow

# tini forwards signals to the flow, which then saves, and reaps ranks that have ended.
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["trialflow", "--help"]
