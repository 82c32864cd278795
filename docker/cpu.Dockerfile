# flowgrpo on a CPU: docker build -f docker/cpu.Dockerfile -t flowgrpo:cpu . && docker run --rm flowgrpo:cpu list methods
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/flowgrpo
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY flowgrpo flowgrpo
COPY configs configs
RUN python -m pip install --no-cache-dir --constraint constraints.txt '.[clip,server,text,parquet,mp4]'
RUN useradd --create-home flowgrpo && mkdir /runs && chown flowgrpo /runs
USER flowgrpo
WORKDIR /runs
ENTRYPOINT ["python", "-m", "flowgrpo"]
CMD ["--help"]
