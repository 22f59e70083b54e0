# From the checkout: docker build -f docker/cpu.Dockerfile -t amos:cpu .
# docs/quickstart.md has the commands. The image was not built yet.
FROM python:3.11-slim

# fairseq is compiled on this Python.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home amos && install --directory --owner amos /opt/amos_fairseq /work
USER amos
COPY --chown=amos . /opt/amos_fairseq

# pip reads both variables. Without an additional index that has CPU builds of torch, pip installs the CUDA build, which also
# runs on a CPU and needs several GB more.
ARG PIP_EXTRA_INDEX_URL
RUN PIP_CONSTRAINT=/opt/amos_fairseq/docker/constraints.txt PIP_NO_CACHE_DIR=1 bash /opt/amos_fairseq/examples/environment.sh

# `docker run --user` may select a user without a home and a name, and libraries write caches.
ENV PATH=/opt/amos_fairseq/.venv/bin:$PATH HOME=/tmp USER=amos
WORKDIR /work
ENTRYPOINT ["amos"]
CMD ["--help"]
