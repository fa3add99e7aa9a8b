# The CUDA kernels, their test and their benches, into build/cuda: `make -f mk/cuda.mk`. Needs nvcc 13, no GPU.
#
# Machine code for sm_80 and sm_90 (one file: sm_90a), and PTX of sm_90 for what comes later. The runtime is
# linked statically, cuBLASLt dynamically.
CUDA_HOME  ?= /usr/local/cuda
NVCC       ?= $(CUDA_HOME)/bin/nvcc
CUDA_BUILD := build/cuda
CUDA_ARCH  ?= -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=[sm_90,compute_90]

CC := gcc
.DEFAULT_GOAL := cuda
include mk/flags.mk

NVCCFLAGS  = -std=c++17 -O3 -lineinfo -I. --compiler-options -Wall,-Wextra,-fPIC,-fvisibility=hidden -Werror all-warnings $(CUDA_ARCH)
# Hopper's own instructions need the target that has no successors.
$(CUDA_BUILD)/compute/cuda/prefill_hopper.cu.o $(CUDA_BUILD)/compute/cuda/product.cu.o: CUDA_ARCH := -gencode arch=compute_80,code=sm_80 \
    -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_90,code=compute_90
CUDA_LIBS := -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcudart_static -lcublasLt -ldl -lrt -lm \
    -pthread

# What daemons load (compute/gpu.h): beside the programs.
CUDA_LIBRARY := build/bin/libspecontext-cuda.so
CUDA_KERNELS := $(patsubst %,$(CUDA_BUILD)/%.o,$(wildcard compute/cuda/*.cu) $(wildcard compute/cuda/*.c))
CUDA_HOST    := $(patsubst %,$(CUDA_BUILD)/%.o,\
    $(wildcard base/*.c compute/*.c compute/cpu/*.c) model/sampler.c)
CUDA_TESTS   := $(patsubst %,$(CUDA_BUILD)/%.o,$(wildcard tests/gpu/*.c))

.PHONY: cuda
cuda: $(CUDA_LIBRARY) $(CUDA_BUILD)/test_cuda $(CUDA_BUILD)/bench_cuda

$(CUDA_BUILD)/%.cu.o: %.cu
	@mkdir -p $(@D)
	@echo "  NVCC $<"
	@$(NVCC) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

$(CUDA_BUILD)/%.c.o: %.c
	@mkdir -p $(@D)
	@echo "  CC   $<"
	@$(CC) $(CPPFLAGS) $(CFLAGS) -fPIC -fvisibility=hidden $(CFLAGS_CUDA_$(notdir $*)) -isystem $(CUDA_HOME)/include -MMD -MP -c $< -o $@

CFLAGS_CUDA_avx2   := -mavx2 -mfma -mf16c
CFLAGS_CUDA_avx512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c

$(CUDA_BUILD)/libcompute_cuda.a: $(CUDA_KERNELS)
	@rm -f $@
	@ar rcs $@ $^

$(CUDA_BUILD)/libhost.a: $(CUDA_HOST)
	@rm -f $@
	@ar rcs $@ $^

CUDA_BASE := $(patsubst %,$(CUDA_BUILD)/%.o,base/alloc.c base/err.c base/check.c base/dtype.c)
$(CUDA_LIBRARY): $(CUDA_KERNELS) $(CUDA_BASE) compute/cuda/exports.map
	@mkdir -p $(@D)
	@echo "  LD   $@"
	@$(CC) -shared -o $@ $(filter %.o,$^) -Wl,--no-undefined -Wl,--exclude-libs,ALL -Wl,--version-script=compute/cuda/exports.map \
	    $(CUDA_LIBS) -lstdc++

CUDA_LINK = $(CC) -o $@ $(filter %.o,$^) $(filter %.a,$^) -l:libxxhash.a $(CUDA_LIBS) -lstdc++

$(CUDA_BUILD)/test_cuda: $(CUDA_TESTS) $(CUDA_BUILD)/libcompute_cuda.a $(CUDA_BUILD)/libhost.a
	@echo "  LD   $@"
	@$(CUDA_LINK)

LAB := $(CUDA_BUILD)/bench/lab
$(CUDA_BUILD)/bench_cuda: $(patsubst %,$(CUDA_BUILD)/%.o,$(wildcard bench/lab/bench_*.cu)) $(LAB)/lab.cu.o \
    $(CUDA_BUILD)/libcompute_cuda.a $(CUDA_BUILD)/libhost.a
	@echo "  LD   $@"
	@$(CUDA_LINK)

-include $(shell find $(CUDA_BUILD) -name '*.d' 2>/dev/null)
