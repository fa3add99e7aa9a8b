# What a person calls.
help:
	@echo "make            all programs into build/bin"
	@echo "make deps       install the Debian/Ubuntu packages that building and testing need"
	@echo "make model      SmolLM2-135M-Instruct (Q4_1 GGUF) into models/"
	@echo "make demo       on a fresh machine: install, build, fetch the model, answer a question about a long text"
	@echo "make check      on a fresh machine: install, build with gcc and clang, run all tests"
	@echo "make bench      micro-benchmarks, with floors and peers"
	@echo "make install    PREFIX=$(PREFIX) DESTDIR=$(DESTDIR)"
	@echo "make format | lint | clean"
	@echo "knobs           CC=gcc|clang SAN=1|thread V=1"

clean:
	$(Q)rm -rf build
