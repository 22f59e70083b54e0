# From the checkout: docker build -f docker/cuda.Dockerfile -t amos:cuda .
# docs/quickstart.md has the commands. The image was not built yet.
# The CUDA version for which the torch of constraints.txt is built; this Ubuntu has Python 3.12.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# Triton compiles its launchers with a C compiler and Python's headers when a kernel is first used.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home amos && install --directory --owner amos /opt/amos_fairseq /work
USER amos
COPY --chown=amos . /opt/amos_fairseq

RUN PIP_CONSTRAINT=/opt/amos_fairseq/docker/constraints.txt PIP_NO_CACHE_DIR=1 bash /opt/amos_fairseq/examples/environment.sh

# `docker run --user` may select a user without a home and a name, and libraries and Triton write caches.
ENV PATH=/opt/amos_fairseq/.venv/bin:$PATH HOME=/tmp USER=amos
WORKDIR /work
ENTRYPOINT ["amos"]
CMD ["--help"]
