# What a person calls. On a fresh machine the packages come first; what needs them is built by a second make,
# because this one has asked pkg-config already.
AGAIN := $(MAKE) --no-print-directory -j$(shell nproc)
SAN_PROC_TESTS := test_run_kill test_run_usage
C_FILES = $(shell git ls-files '*.c' '*.h')

# Objects of test binaries are kept, so that a second make has nothing to do.
.SECONDARY:
.PHONY: eval ablation unit-tests tests benches fuzz fuzz-targets cuda cuda-if-there

help:
	@echo "make            all programs into build/bin"
	@echo "make deps       install the Debian/Ubuntu packages that building and testing need"
	@echo "make model      SmolLM2-135M-Instruct (Q4_1 GGUF) into models/"
	@echo "make demo       on a fresh machine: install, build, fetch the model, answer a question about a long text"
	@echo "make check      on a fresh machine: install, build with gcc and clang, run all tests"
	@echo "make tests      the tests of one build; tests/run runs them"
	@echo "make cuda       the CUDA kernels, their test and bench, into build/cuda (needs nvcc 13; CUDA_HOME=$(CUDA_HOME))"
	@echo "make bundle     build/bundle: programs with the libraries that a bare machine lacks; BUNDLE_TESTS=: further ones"
	@echo "make fuzz       FUZZ_SECONDS=60: fuzz targets of messages and file formats, under sanitizers"
	@echo "make bench      micro-benchmarks and the whole, with floors; LLAMA_PYTHON=python with llama_cpp: beside llama.cpp"
	@echo "make ablation   retrieval heads and all ways to select, on texts: attention found, sparse against full"
	@echo "make eval       that, tasks and long generations; EVAL_DEVICE=cuda:0, else hours; EVAL_FLAGS=: more options"
	@echo "make install    PREFIX=$(PREFIX) DESTDIR=$(DESTDIR)"
	@echo "make format | lint | clean"
	@echo "knobs           CC=gcc|clang SAN=1|thread V=1"

deps:
	$(Q)mk/deps.sh

model: deps
	$(Q)mk/model.sh

demo: deps model
	$(Q)$(AGAIN) CC=gcc SAN= all
	$(Q)mk/demo.sh

unit-tests: $(FAKEGPU) $(UNIT_TESTS:%=$(BUILD)/tests/unit/%)
tests: all unit-tests $(PROC_TESTS:%=$(BUILD)/tests/proc/%)
benches: $(BENCHES:%=$(BUILD)/bench/%)

# The CUDA kernels, where nvcc is; their test reports itself skipped where no GPU is (exit status 77).
CUDA_HOME ?= /usr/local/cuda
cuda:
	$(Q)$(AGAIN) -f mk/cuda.mk
GPU_CHECK := build/gcc/tests/gpu/check/check_library
cuda-if-there: $(GPU_CHECK)
	$(Q)if [ -x $(CUDA_HOME)/bin/nvcc ]; then \
	    $(AGAIN) -f mk/cuda.mk && { build/cuda/test_cuda || [ $$? = 77 ]; } && \
	    { SPECONTEXT_GPU_LIBRARY=build/bin/libspecontext-cuda.so $(GPU_CHECK) || [ $$? = 77 ]; }; \
	else echo "cuda: skipped, no $(CUDA_HOME)/bin/nvcc"; fi

# gcc: everything; clang: everything builds, unit tests; gcc with sanitizers: unit tests, and whole daemons being
# killed and refused.
check: deps model
	$(Q)$(AGAIN) CC=gcc SAN= tests benches
	$(Q)$(AGAIN) CC=clang SAN= all unit-tests
	$(Q)$(AGAIN) CC=gcc SAN=1 all unit-tests $(SAN_PROC_TESTS:%=build/gcc-san/tests/proc/%)
	$(Q)$(MAKE) --no-print-directory cuda-if-there
	$(Q)tests/run build/gcc build/clang build/gcc-san

# Each target for FUZZ_SECONDS; what it finds stays in build/fuzz/NAME.
FUZZ_SECONDS ?= 60
fuzz: deps
	$(Q)$(AGAIN) CC=clang SAN=fuzz fuzz-targets
	$(Q)for f in $(FUZZERS); do \
	    mkdir -p build/fuzz/$$f && \
	    build/clang-sanfuzz/tests/fuzz/$$f -max_total_time=$(FUZZ_SECONDS) -timeout=10 -verbosity=0 \
	        -print_final_stats=1 -artifact_prefix=build/fuzz/$$f/ build/fuzz/$$f || exit 1; done
fuzz-targets: $(FUZZERS:%=$(BUILD)/tests/fuzz/%)

# LLAMA_PYTHON: a Python that has llama-cpp-python, to run llama.cpp in turn with ours.
BENCH_MODEL  := models/SmolLM2-135M-Instruct.Q4_1.gguf
LLAMA_PYTHON ?=
bench: deps model
	$(Q)$(AGAIN) CC=gcc SAN= all benches
	$(Q)for b in $(BENCHES); do echo "== $$b"; build/gcc/bench/$$b || exit 1; done
	$(Q)echo "== elastic loading"; bench/elastic.sh build/bin $(BENCH_MODEL)
	$(Q)echo "== specontext bench"; build/bin/specontext bench -m $(BENCH_MODEL) -d 0,4000 --selection previous
	$(Q)echo "== llama.cpp"; if [ -n "$(LLAMA_PYTHON)" ]; then \
	    $(LLAMA_PYTHON) bench/compare.py build/bin $(BENCH_MODEL); \
	else echo "skipped: LLAMA_PYTHON names no Python with llama_cpp"; fi

# BUNDLE_TESTS: further programs, for a machine that cannot build.
BUNDLE_TESTS ?=
bundle: all $(filter-out build/cuda/%,$(BUNDLE_TESTS))
	$(Q)! [ -x $(CUDA_HOME)/bin/nvcc ] || $(AGAIN) -f mk/cuda.mk
	$(Q)mk/bundle.sh build/bundle $(BUNDLE_TESTS)

# Retrieval heads on texts that none was trained on (tools/eval_texts.py says what they are): oracles, sparse against
# full attention and what each choice is worth (ablation); tasks; long generations. EVAL_DEVICE=cuda:0: minutes; on a
# CPU hours. Tables on standard output, JSON and the plot in build/eval.
EVAL_TEXTS  := build/eval/novel.txt build/eval/jargon.txt build/eval/sqlite.txt
EVAL_HEAD   := heads/SmolLM2-135M-Instruct.safetensors
EVAL_EMBEDDING := heads/alternatives/SmolLM2-135M-Instruct.embedding2.safetensors
EVAL_DEVICE ?= cpu
EVAL_FLAGS  ?=
EVAL_ALL     = --device $(EVAL_DEVICE) $(EVAL_FLAGS)
$(EVAL_TEXTS) &:
	$(Q)python3 tools/eval_texts.py --out build/eval
ablation: deps model
	$(Q)$(AGAIN) CC=gcc SAN= all $(EVAL_TEXTS)
	$(Q)bench/heads.sh build/bin $(BENCH_MODEL) $(EVAL_HEAD) $(EVAL_TEXTS) -- --context 8192 --from 4096 --steps 512 \
	    --plot build/eval/mass.svg --json-file build/eval/ablation.json $(EVAL_ALL)
eval: ablation
	$(Q)build/bin/specontext eval -m $(BENCH_MODEL) -H $(EVAL_HEAD) -H $(EVAL_EMBEDDING) -H bootstrap -H newest \
	    --budget 1024 --tasks all --items 130 --task-floor 0.5 --task-context 2048,4096 --json-file build/eval/tasks.json $(EVAL_ALL)
	$(Q)build/bin/specontext eval -m $(BENCH_MODEL) -H $(EVAL_HEAD) -H $(EVAL_EMBEDDING) -H newest \
	    --budget 512,1024 $(EVAL_TEXTS:%=-f %) --no-texts --long-generation 6144 --long-prompt 2048 --long-prompts 2 --long-seeds 1 \
	    --json-file build/eval/long.json $(EVAL_ALL)

# The programs find each other, and what `make cuda` made, beside themselves, so they go into one folder.
INTO := $(DESTDIR)$(PREFIX)
install: all
	install -d $(INTO)/bin $(INTO)/share/specontext/heads/alternatives $(INTO)/share/doc/specontext/heads
	install -m 755 $(PROGRAMS) $(wildcard build/bin/libspecontext-cuda.so) $(INTO)/bin
	install -m 644 heads/*.safetensors $(INTO)/share/specontext/heads
	install -m 644 heads/alternatives/*.safetensors $(INTO)/share/specontext/heads/alternatives
	install -m 644 README.md ARCHITECTURE.md PROTOCOL.md SHARED-MEMORY.md LICENSE NOTICE $(INTO)/share/doc/specontext
	install -m 644 heads/README.md $(INTO)/share/doc/specontext/heads

format:
	$(Q)clang-format -i $(C_FILES)

# What cppcheck gets wrong: compound literals after `?`, jansson's loops, arrays that a loop or a callee fills, bytes
# of files and buffers that are aligned floats.
LINT_WRONG := internalAstError unknownMacro uninitvar invalidPointerCast constStatement invalidFunctionArg \
    arrayIndexOutOfBounds shiftTooManyBitsSigned
lint:
	$(Q)clang-format --dry-run -Werror $(C_FILES)
	$(Q)! command -v cppcheck >/dev/null || cppcheck --quiet --std=c11 --inline-suppr --error-exitcode=1 \
	    --enable=warning,portability --suppress=missingIncludeSystem $(LINT_WRONG:%=--suppress=%) -I. $(filter %.c,$(C_FILES))

clean:
	$(Q)rm -rf build
