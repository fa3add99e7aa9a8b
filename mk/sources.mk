# What each program and library is made of. A library is a folder; folders may use only what stands left of
# them: base, proto, link, model, compute (see ARCHITECTURE.md; tests/unit/test_tidy.c checks the includes).
LIBS    := base proto link model compute
DAEMONS := kvstore retriever decoder

SRC_base    := $(wildcard base/*.c)
SRC_proto   := $(wildcard proto/*.c)
SRC_link    := $(wildcard link/*.c)
SRC_model   := $(wildcard model/*.c)
SRC_compute := $(wildcard compute/*.c compute/cpu/*.c)

# main.c is kept out of a daemon's archive so that unit tests can link the rest.
SRC_kvstore   := $(filter-out kvstore/main.c,$(wildcard kvstore/*.c))
SRC_retriever := $(filter-out retriever/main.c,$(wildcard retriever/*.c))
SRC_decoder   := $(filter-out decoder/main.c,$(wildcard decoder/*.c))
# Measures in one process, with code of all daemons: a program of its own.
SRC_eval      := $(filter-out eval/main.c,$(wildcard eval/*.c))
SRC_launch    := $(filter-out launch/main.c,$(wildcard launch/*.c))

UNIT_TESTS := $(patsubst tests/unit/%.c,%,$(wildcard tests/unit/test_*.c))
PROC_TESTS := $(patsubst tests/proc/%.c,%,$(wildcard tests/proc/test_*.c))
SRC_testlib := $(wildcard tests/lib/*.c)
# The double of a GPU, a library of its own: position-independent, with what it needs of ours inside.
SRC_fakegpu := $(wildcard tests/fakegpu/*.c) $(SRC_base) $(SRC_compute) model/sampler.c
FAKEGPU     := $(BUILD)/tests/libspecontext-fakegpu.so
BENCHES    := $(patsubst bench/%.c,%,$(wildcard bench/bench_*.c))
FUZZERS    := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))

PROGRAMS := $(BIN)/specontext $(DAEMONS:%=$(BIN)/specontext-%) $(BIN)/specontext-eval
ARCHIVES := $(foreach l,eval kvstore retriever decoder launch compute model link proto base,$(BUILD)/lib$(l).a)
