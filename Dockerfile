# The course on a CPU:  docker build -t minitrain .
#                       docker run --rm -it --init -p 127.0.0.1:8888:8888 -v minitrain-work:/course/work minitrain
# JupyterLab prints its address, with a token. Chapters need 2 cores and 4 GB.
FROM python:3.11-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends git libseccomp2 make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /course
COPY . .
RUN TORCH=cpu python minitrain/course/install.py && minitrain doctor
EXPOSE 8888
CMD ["minitrain", "lab", "--ip", "0.0.0.0", "--no-browser"]
