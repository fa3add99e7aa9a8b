# SpeContext: everything is built from here. `make help` lists the targets.
#
# Knobs: CC=gcc|clang  SAN=1 (address + undefined)  SAN=thread  V=1 (show commands)  PREFIX=  DESTDIR=
CC      ?= gcc
SAN     ?=
V       ?=
PREFIX  ?= /usr/local
DESTDIR ?=

ifeq ($(origin CC),default)
CC := gcc
endif

VERSION := 0.1.0
CONFIG  := $(notdir $(firstword $(CC)))$(if $(SAN),-san$(filter-out 1,$(SAN)))
BUILD   := build/$(CONFIG)
# The default build is the one that `make install`, the demo and the tests of processes use.
BIN     := $(if $(filter gcc,$(CONFIG)),build/bin,$(BUILD)/bin)
Q       := $(if $(V),,@)

include mk/flags.mk
include mk/sources.mk

.DEFAULT_GOAL := all
.PHONY: all deps model demo check bench bundle install format lint clean help build-deps

all: $(PROGRAMS)

include mk/rules.mk
include mk/targets.mk
