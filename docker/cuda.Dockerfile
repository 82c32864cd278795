# flowgrpo on NVIDIA GPUs:
#   docker build -f docker/cuda.Dockerfile -t flowgrpo:cuda .
#   docker run --rm --gpus all --shm-size 8g -v $PWD/runs:/runs -v $HOME/.cache/huggingface:/cache flowgrpo:cuda check MODEL
FROM pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/flowgrpo
COPY pyproject.toml README.md LICENSE ./
COPY flowgrpo flowgrpo
COPY configs configs
RUN python -m pip install --no-cache-dir '.[clip,server,text,parquet,mp4,bitsandbytes,torchao]'
ENV HF_HOME=/cache
WORKDIR /runs
ENTRYPOINT ["python", "-m", "flowgrpo"]
CMD ["--help"]
