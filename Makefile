# SpeContext: everything is built from here. `make help` lists the targets.
#
# Knobs: CC=gcc|clang  SAN=1 (address + undefined)  SAN=thread  V=1 (show commands)  PREFIX=  DESTDIR=
ifeq ($(origin CC),default)
CC := gcc
endif
SAN     ?=
V       ?=
PREFIX  ?= /usr/local
DESTDIR ?=

CONFIG  := $(notdir $(firstword $(CC)))$(if $(SAN),-san$(filter-out 1,$(SAN)))
BUILD   := build/$(CONFIG)
# The default build is the one that `make install`, the demo and the tests of processes use.
BIN     := $(if $(filter gcc,$(CONFIG)),build/bin,$(BUILD)/bin)
Q       := $(if $(V),,@)

include mk/flags.mk
include mk/sources.mk

.DEFAULT_GOAL := all
.PHONY: all deps model demo check bench bundle install format lint clean help

all: $(PROGRAMS)

include mk/rules.mk
include mk/targets.mk
