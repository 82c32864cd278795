# flowgrpo on NVIDIA GPUs:
#   docker build -f docker/cuda.Dockerfile -t flowgrpo:cuda .
#   docker run --rm --gpus all --shm-size 8g -v $PWD/runs:/runs -v $HOME/.cache/huggingface:/cache flowgrpo:cuda check MODEL
# torch brings its CUDA libraries; gcc is for triton.
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/flowgrpo
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY flowgrpo flowgrpo
COPY configs configs
RUN python -m pip install --no-cache-dir --constraint constraints.txt '.[clip,server,text,parquet,mp4,bitsandbytes,torchao]'
ENV HF_HOME=/cache NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /runs
ENTRYPOINT ["python", "-m", "flowgrpo"]
CMD ["--help"]
