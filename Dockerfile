# coterie with what a consortium needs, on CPUs: docker build --tag coterie .
# The first stage makes wheels, of coterie and of all it needs. The second installs them: no compiler, no source, no root.
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /source
COPY requirements.lock constraints.txt ./
# torch by itself: another index has the build without CUDA. All else is pinned by hash.
RUN pip wheel --no-cache-dir --wheel-dir /wheels --only-binary :all: --no-deps \
        --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' constraints.txt)" \
    && pip wheel --no-cache-dir --wheel-dir /wheels --no-deps --require-hashes --requirement requirements.lock
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --wheel-dir /wheels --no-deps .

FROM python:${PYTHON}
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --no-deps /wheels/*.whl \
    && pip check \
    && useradd --create-home --uid 10001 coterie \
    && install --directory --owner coterie --mode 700 /consortium /work
USER 10001
WORKDIR /work
ENTRYPOINT ["coterie"]
CMD ["--help"]
