# The README's two commands on a CPU: docker build -t mmfast . && docker run --rm mmfast
FROM python:3.11-slim

# g++ for torch.compile, git for the packaging test.
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /mmfast
COPY . .
RUN git init -q . && git add -A
ENV HF_HUB_OFFLINE=1
RUN pip install --no-cache-dir -e . && mmfast ask assets/clips/red-circle.mp4 "Which way does the red circle move?"
CMD ["bash", "-c", "pip install --no-cache-dir -e '.[test]' && pytest"]
