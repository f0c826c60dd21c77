#!/bin/bash
# SPDX-License-Identifier: GPL-3.0-or-later
# usage: wheels.sh DIR
#
# Fills DIR/load1 and DIR/load2, each under 56 MB, with what a GPU host without a package index needs to run two releases of SGLang
# beside its Python 3.12 and torch 2.11.0 (CUDA 13): 0.5.12.post1, and 0.5.14 as an overlay. The kernel wheels of 300 MB are slimmed to
# their Hopper kernels; FlashAttention 3 is left out, so start servers with --attention-backend triton --sampling-backend pytorch.
set -euo pipefail
dir=$1
mkdir -p "$dir/load1" "$dir/load2"
platforms=()
for n in 39 35 34 31 28 27 26 24 17 14 12 5; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
for p in manylinux2014 manylinux2010 manylinux1; do platforms+=(--platform "${p}_x86_64"); done

get() { # DIR PACKAGE
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
        "${platforms[@]}" --platform any -d "$1" "$2"
}

kernels() { # VERSION TARGET: the Hopper kernels of sglang-kernel, as an archive to unpack beside the rest
    local tmp
    tmp=$(mktemp -d)
    get "$tmp" "sglang-kernel==$1"
    (
        cd "$tmp"
        python3 -m zipfile -e sglang_kernel-*.whl whole
        cd whole
        rm -rf lib _mscclpp* sgl_kernel/sm100 sgl_kernel/flash_ops.abi3.so sgl_kernel/flashmla_ops.abi3.so
        python3 -m zipfile -c ../slim.zip ./*
    )
    mv "$tmp/slim.zip" "$2"
    rm -rf "$tmp"
}

for package in sglang==0.5.12.post1 transformers==5.6.0 tokenizers==0.22.2 openai==2.6.1 openai-harmony==0.0.4 fastapi==0.115.12 \
    starlette==0.46.2 uvicorn pydantic==2.14.4 pydantic-core==2.50.5 typing_inspection annotated-types orjson pyzmq msgspec setproctitle \
    interegular partial-json-parser pybase64 python-multipart ipython ipython_pygments_lexers parso pexpect ptyprocess prompt_toolkit \
    wcwidth matplotlib-inline decorator stack-data asttokens executing pure_eval traitlets soundfile cffi pycparser watchfiles \
    torch_memory_saver distro jiter sniffio loguru gguf compressed-tensors diskcache lark cloudpickle referencing jsonschema \
    jsonschema-specifications rpds-py nest-asyncio einops dill httptools apache-tvm-ffi==0.1.11; do
    get "$dir/load1" "$package"
done
kernels 0.4.2.post2 "$dir/load1/sgl_kernel.zip"
get "$dir/load2" flashinfer-python==0.6.11.post1
# What flashinfer.comm imports besides: without them all-reduce fusion is off, and SGLang says so in its log alone.
for package in cuda-tile==1.7.0 nvidia-ml-py; do
    get "$dir/load2" "$package"
done
mkdir -p "$dir/load2/overlay"
get "$dir/load2/overlay" sglang==0.5.14
get "$dir/load2/overlay" transformers==5.8.1
kernels 0.4.4 "$dir/load2/overlay/sgl_kernel.zip"
du -sm "$dir"/load*
