# Compiler flags. -O3 and no -ffast-math: results must not depend on what a compiler reassociates.
VERSION := 0.1.0
WARN := -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wpointer-arith \
        -Wwrite-strings -Wformat=2 -Wundef
PKGS := libzmq msgpack libsystemd libpcre2-8 libutf8proc jansson yajl libxxhash

CPPFLAGS += -I. -D_GNU_SOURCE -DSPECONTEXT_VERSION='"$(VERSION)"'
CFLAGS   := -std=c17 -O3 -g -fno-strict-aliasing -ffp-contract=off -fno-math-errno -pthread $(WARN) $(EXTRA_CFLAGS)
# A bundle's libraries lie beside its programs (mk/bundle.sh); old tags, as libraries' own needs are found by them too.
LDFLAGS  += -Wl,-rpath,\$$ORIGIN/../lib -Wl,--disable-new-dtags
LDLIBS   := -lm -pthread -ldl
PKG_LIBS := $(shell pkg-config --libs $(PKGS) 2>/dev/null)

ifeq ($(SAN),1)
CFLAGS  += -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
LDFLAGS += -fsanitize=address,undefined
else ifeq ($(SAN),fuzz)
# clang only; everything that is linked is a fuzz target then.
CFLAGS  += -O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
LDFLAGS += -fsanitize=fuzzer,address,undefined
else ifeq ($(SAN),thread)
CFLAGS  += -O1 -fsanitize=thread -fno-omit-frame-pointer
LDFLAGS += -fsanitize=thread
endif
