# Tandem. `make help` lists the targets. Objects mirror the sources under build/ (BUILD=...).
# No recursion, no generated makefiles: a folder is a layer, and each layer is one archive.
SHELL      := /bin/bash
BUILD      ?= build
CC         := $(if $(filter default undefined,$(origin CC)),gcc,$(CC))
CUDA       ?= auto
SAN        ?=
OPT        ?= -O2
.DEFAULT_GOAL := all

# ---- what the machine has -------------------------------------------------------------------------------------------
NVCC       := $(if $(filter 0,$(CUDA)),,$(shell command -v nvcc 2>/dev/null || ls /usr/local/cuda/bin/nvcc 2>/dev/null))
PKG_CONFIG := pkg-config
PKGS       := libuv jansson libpcre2-8 libxxhash libprotobuf-c ucx openssl
LLHTTP_SRC := /usr/share/llhttp
LLHTTP_INC := /usr/share/include/llhttp

# ---- flags ----------------------------------------------------------------------------------------------------------
WARN       := -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla
SANFLAGS   := $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=undefined)
CPPFLAGS   += -I. -I$(BUILD)/gen -D_GNU_SOURCE $(if $(SAN)$(FAULTS),-DTD_FAULTS=1)
CFLAGS     += -std=c17 -g $(OPT) $(WARN) -fno-math-errno -ffp-contract=off -pthread -MMD -MP $(SANFLAGS)
LDFLAGS    += -pthread $(SANFLAGS)

# ---- layers: "folder" or "folder:needs" (tests/lint/layers.py holds the same list and checks every include) -----------
LAYERS     := common/base common/config common/metrics common/text kernels common/loop common/rpc common/http \
              common/transfer common/coll common/model common/engine common/handoff router prefill decode deploy/ctl
PROTOS     := $(wildcard proto/*.proto)
GEN_C      := $(PROTOS:proto/%.proto=$(BUILD)/gen/proto/%.pb-c.c)
GEN_H      := $(GEN_C:.c=.h)

lib_of      = $(BUILD)/lib/lib$(subst /,_,$(1)).a
layer_src   = $(filter-out %/main.c,$(wildcard $(1)/*.c)) $(if $(filter kernels,$(1)),$(wildcard kernels/cpu/*.c))
layer_obj   = $(patsubst %.c,$(BUILD)/obj/%.o,$(call layer_src,$(1)))
# Most dependent first, so that one pass of the linker resolves everything.
LIBS_ALL    = $(foreach l,$(call reverse,$(LAYERS)),$(call lib_of,$(l))) $(BUILD)/lib/libproto.a $(BUILD)/lib/libllhttp.a
reverse     = $(if $(1),$(call reverse,$(wordlist 2,$(words $(1)),$(1))) $(firstword $(1)))

ROUTER_LAYERS := common/base common/config common/metrics common/text common/loop common/rpc common/http router
CTL_LAYERS    := common/base common/config common/metrics common/text common/loop common/rpc common/http deploy/ctl
WORKER_LAYERS := common/base common/config common/metrics common/text kernels common/loop common/rpc common/http \
                 common/transfer common/coll common/model common/engine common/handoff
link_libs     = $(foreach l,$(call reverse,$(1)),$(call lib_of,$(l))) $(BUILD)/lib/libproto.a $(BUILD)/lib/libllhttp.a

BASE_LIBS   := -lgrpc -lgpr $(shell $(PKG_CONFIG) --libs libuv jansson libpcre2-8 libxxhash libprotobuf-c openssl 2>/dev/null) -lm -ldl
UCX_LIBS    := $(shell $(PKG_CONFIG) --libs ucx 2>/dev/null)
CPPFLAGS    += $(shell $(PKG_CONFIG) --cflags libuv jansson libpcre2-8 libxxhash libprotobuf-c ucx openssl 2>/dev/null) -I$(LLHTTP_INC)

BINARIES   := $(addprefix $(BUILD)/bin/,tandem-router tandem-prefill tandem-decode tandemctl)

.PHONY: all
all: $(BINARIES)

$(BUILD)/bin/tandem-router: $(BUILD)/obj/router/main.o $(call link_libs,$(ROUTER_LAYERS))
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $^ $(BASE_LIBS)
$(BUILD)/bin/tandem-prefill: $(BUILD)/obj/prefill/main.o $(call link_libs,$(WORKER_LAYERS) prefill)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $^ $(BASE_LIBS) $(UCX_LIBS)
$(BUILD)/bin/tandem-decode: $(BUILD)/obj/decode/main.o $(call link_libs,$(WORKER_LAYERS) decode)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $^ $(BASE_LIBS) $(UCX_LIBS)
$(BUILD)/bin/tandemctl: $(BUILD)/obj/deploy/ctl/main.o $(call link_libs,$(CTL_LAYERS))
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $^ $(BASE_LIBS)

define LAYER_RULE
$(call lib_of,$(1)): $(call layer_obj,$(1))
	@mkdir -p $$(@D)
	@rm -f $$@
	ar rcs $$@ $$^
endef
$(foreach l,$(LAYERS),$(eval $(call LAYER_RULE,$(l))))

$(BUILD)/lib/libproto.a: $(GEN_C:.c=.o)
	@mkdir -p $(@D)
	ar rcs $@ $^
$(BUILD)/lib/libllhttp.a: $(patsubst %,$(BUILD)/obj/llhttp/%.o,api http llhttp)
	@mkdir -p $(@D)
	ar rcs $@ $^
$(BUILD)/obj/llhttp/%.o: $(LLHTTP_SRC)/%.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) -std=gnu11 -O2 -w -pthread $(SANFLAGS) -c -o $@ $<

$(BUILD)/gen/proto/%.pb-c.c $(BUILD)/gen/proto/%.pb-c.h: proto/%.proto $(PROTOS)
	@mkdir -p $(BUILD)/gen
	protoc-c --c_out=$(BUILD)/gen $<
$(BUILD)/gen/proto/%.o: $(BUILD)/gen/proto/%.pb-c.c | $(GEN_H)
	$(CC) $(CPPFLAGS) -std=c17 -O2 -w -pthread $(SANFLAGS) -c -o $@ $<

$(BUILD)/obj/%.o: %.c | $(GEN_H)
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(CFLAGS_$(subst /,_,$*)) -c -o $@ $<

# ---- unit tests: every tests/unit/**/X_test.c is a cmocka program linked with all layers -----------------------------------
UNIT_SRC   := $(shell find tests/unit -name '*_test.c' 2>/dev/null | sort)
UNIT_BIN   := $(UNIT_SRC:tests/unit/%.c=$(BUILD)/unit/%)
SUPPORT_OBJ := $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard tests/support/*.c))
$(BUILD)/unit/%: $(BUILD)/obj/tests/unit/%.o $(SUPPORT_OBJ) $(call link_libs,$(LAYERS))
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $^ $(BASE_LIBS) $(UCX_LIBS) -lcmocka
.PHONY: unit-build unit
unit-build: $(UNIT_BIN)
# ONLY=common/text runs the tests whose path contains it.
UNIT_SELECTED = $(if $(ONLY),$(foreach t,$(UNIT_BIN),$(if $(findstring $(ONLY),$(t)),$(t))),$(UNIT_BIN))
unit: $(if $(ONLY),$(foreach t,$(UNIT_BIN),$(if $(findstring $(ONLY),$(t)),$(t))),unit-build)
	@fail=0; for t in $(UNIT_SELECTED); do \
	   echo "== $$t"; $$t || fail=1; done; exit $$fail

-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
.SECONDARY:
