# Tandem. `make help` lists the targets. Objects mirror the sources under build/ (BUILD=...).
# No recursion, no generated makefiles: a folder is a layer, and each layer is one archive.
MAKEFLAGS  += -r
SHELL      := /bin/bash
BUILD      ?= build
CC         := $(if $(filter default undefined,$(origin CC)),gcc,$(CC))
CUDA       ?= auto
SAN        ?=
OPT        ?= -O2
Q          := $(if $(V),,@)
comma      := ,
say         = $(if $(V),,@echo '  $(1) $(2)')
.DEFAULT_GOAL := all

# ---- what the machine has -------------------------------------------------------------------------------------------
NVCC       := $(if $(filter 0,$(CUDA)),,$(shell command -v nvcc 2>/dev/null || ls /usr/local/cuda/bin/nvcc 2>/dev/null))
PKG_CONFIG := pkg-config
PKGS       := libuv jansson libpcre2-8 libxxhash libprotobuf-c ucx openssl
LLHTTP_SRC := /usr/share/llhttp
LLHTTP_INC := /usr/share/include/llhttp

# ---- flags ----------------------------------------------------------------------------------------------------------
WARN       := -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla
# gcc's flow warnings see what sanitizers insert, and are wrong about it.
WARN       += $(if $(SAN),$(if $(findstring clang,$(CC)),,-Wno-format-truncation -Wno-maybe-uninitialized))
SANFLAGS   := $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=undefined)
CPPFLAGS   += -I. -I$(BUILD)/gen -D_GNU_SOURCE $(if $(SAN)$(FAULTS),-DTD_FAULTS=1)
CFLAGS     += -std=c17 -g $(OPT) $(WARN) -fno-math-errno -ffp-contract=off -pthread -MMD -MP $(SANFLAGS)
# Libraries beside the programs come first, also for what they need themselves: the tree of `make dist`.
RPATH      := -Wl,-rpath,'$$ORIGIN/../lib',--disable-new-dtags
LDFLAGS    += -pthread $(SANFLAGS) $(RPATH)

# Leaf arithmetic takes minutes under ThreadSanitizer; who runs it on what is pool.c, which stays watched.
CFLAGS_UNWATCHED := $(if $(findstring thread,$(SAN)),-fno-sanitize=thread -O2)
$(foreach f,micro_scalar micro_avx2 micro_avx512 pack_weight,$(eval CFLAGS_kernels_cpu_$(f) += $(CFLAGS_UNWATCHED)))

# ---- layers: "folder" or "folder:needs" (tests/lint/layers.py holds the same list and checks every include) -----------
LAYERS     := common/base common/config common/metrics common/text kernels common/loop common/rpc common/http \
              common/transfer common/coll common/model common/engine common/handoff common/worker router prefill decode deploy/ctl
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
                 common/transfer common/coll common/model common/engine common/handoff common/worker
link_libs     = $(foreach l,$(call reverse,$(1)),$(call lib_of,$(l))) $(BUILD)/lib/libproto.a $(BUILD)/lib/libllhttp.a

BASE_LIBS   := -lgrpc -lgpr $(shell $(PKG_CONFIG) --libs libuv jansson libpcre2-8 libxxhash libprotobuf-c openssl zlib 2>/dev/null) -lm -ldl
UCX_LIBS    := $(shell $(PKG_CONFIG) --libs ucx 2>/dev/null)
CPPFLAGS    += $(shell $(PKG_CONFIG) --cflags libuv jansson libpcre2-8 libxxhash libprotobuf-c ucx openssl 2>/dev/null) -I$(LLHTTP_INC)

BINARIES   := $(addprefix $(BUILD)/bin/,tandem-router tandem-prefill tandem-decode tandemctl)

.PHONY: all
all: $(BINARIES)

$(BUILD)/bin/tandem-router: $(BUILD)/obj/router/main.o $(call link_libs,$(ROUTER_LAYERS))
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(BASE_LIBS)
$(BUILD)/bin/tandem-prefill: $(BUILD)/obj/prefill/main.o $(call link_libs,$(WORKER_LAYERS) prefill)
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(BASE_LIBS) $(UCX_LIBS)
$(BUILD)/bin/tandem-decode: $(BUILD)/obj/decode/main.o $(call link_libs,$(WORKER_LAYERS) decode)
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(BASE_LIBS) $(UCX_LIBS)
$(BUILD)/bin/tandemctl: $(BUILD)/obj/deploy/ctl/main.o $(call link_libs,$(CTL_LAYERS))
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(BASE_LIBS)

define LAYER_RULE
$(call lib_of,$(1)): $(call layer_obj,$(1))
	@mkdir -p $$(@D)
	@rm -f $$@
	$$(call say,ar  ,$$@)
	$$(Q)ar rcs $$@ $$^
endef
$(foreach l,$(LAYERS),$(eval $(call LAYER_RULE,$(l))))

$(BUILD)/lib/libproto.a: $(GEN_C:.c=.o)
	@mkdir -p $(@D)
	$(call say,ar  ,$@)
	$(Q)ar rcs $@ $^
$(BUILD)/lib/libllhttp.a: $(patsubst %,$(BUILD)/obj/llhttp/%.o,api http llhttp)
	@mkdir -p $(@D)
	$(call say,ar  ,$@)
	$(Q)ar rcs $@ $^
$(BUILD)/obj/llhttp/%.o: $(LLHTTP_SRC)/%.c
	@mkdir -p $(@D)
	$(call say,cc  ,$<)
	$(Q)$(CC) $(CPPFLAGS) -std=gnu11 -O2 -w -pthread $(SANFLAGS) -c -o $@ $<

$(BUILD)/gen/proto/%.pb-c.c $(BUILD)/gen/proto/%.pb-c.h: proto/%.proto $(PROTOS)
	@mkdir -p $(BUILD)/gen
	$(call say,gen ,$<)
	$(Q)protoc-c --c_out=$(BUILD)/gen $<
$(BUILD)/gen/proto/%.pb-c.o: $(BUILD)/gen/proto/%.pb-c.c | $(GEN_H)
	$(call say,cc  ,$<)
	$(Q)$(CC) $(CPPFLAGS) -std=c17 -O2 -w -pthread $(SANFLAGS) -c -o $@ $<

# Descriptors of every service, embedded for server reflection.
DESCRIPTORS := $(BUILD)/gen/proto/descriptors.inc
$(DESCRIPTORS): $(PROTOS)
	@mkdir -p $(@D)
	$(call say,gen ,$@)
	$(Q)protoc-c --include_imports --descriptor_set_out=$(@:.inc=.bin) $(PROTOS)
	$(Q)od -An -v -tx1 $(@:.inc=.bin) | sed 's/ \([0-9a-f][0-9a-f]\)/0x\1,/g' > $@
$(BUILD)/obj/common/rpc/reflection.o: $(DESCRIPTORS)
$(BUILD)/obj/router/page.o: router/page.html

$(BUILD)/obj/%.o: %.c | $(GEN_H)
	@mkdir -p $(@D)
	$(call say,cc  ,$<)
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) $(CFLAGS_$(subst /,_,$*)) -c -o $@ $<

# ---- unit tests: every tests/unit/**/X_test.c is a cmocka program linked with all layers -----------------------------------
UNIT_SRC   := $(shell find tests/unit -name '*_test.c' 2>/dev/null | sort)
UNIT_BIN   := $(UNIT_SRC:tests/unit/%.c=$(BUILD)/unit/%)
# What benchmarks share with their tests.
BENCH_TESTED := $(addprefix tests/bench/,floors.c shape.c spread.c)
SUPPORT_OBJ := $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard tests/support/*.c) $(BENCH_TESTED))
$(BUILD)/unit/%: $(BUILD)/obj/tests/unit/%.o $(SUPPORT_OBJ) $(call link_libs,$(LAYERS))
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(BASE_LIBS) $(UCX_LIBS) -lcmocka
$(BUILD)/unit/common/engine/ahead_test: $(BUILD)/obj/tests/kernels/ahead.o # what the GPU is checked with
.PHONY: unit-build unit
unit-build: $(UNIT_BIN)
# ONLY=common/text runs the tests whose path contains it.
UNIT_SELECTED = $(if $(ONLY),$(foreach t,$(UNIT_BIN),$(if $(findstring $(ONLY),$(t)),$(t))),$(UNIT_BIN))
unit: $(if $(ONLY),$(foreach t,$(UNIT_BIN),$(if $(findstring $(ONLY),$(t)),$(t))),unit-build)
	@failed=; for t in $(UNIT_SELECTED); do \
	   echo "== $$t"; timeout 600 $$t || failed="$$failed $$t($$?)"; done; \
	 [ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

# ---- the simulated cluster: the daemons' modules on twins of common/loop, common/rpc and the engine, which the linker finds
# first. --wrap: the log, and functions that tests/sim/planted.c replaces by wrong ones.
SIM_BIN    := $(BUILD)/bin/sim
SIM_OBJ    := $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard tests/sim/*.c))
SIM_WRAP   := $(shell sed -n 's/.*__wrap_\(td_[a-z_]*\)[^a-z_].*/\1/p; s/^WRAP.[a-z0-9_ ]*, \(td_[a-z_]*\),.*/\1/p' tests/sim/*.c | sort -u)
$(SIM_BIN): $(SIM_OBJ) $(call link_libs,$(LAYERS))
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) $(LDFLAGS) $(addprefix -Wl$(comma)--wrap=,$(SIM_WRAP)) -o $@ $^ $(BASE_LIBS) $(UCX_LIBS)

# ---- fuzz targets: tests/fuzz/X_fuzz.c, one LLVMFuzzerTestOneInput each, built with clang in a tree of its own ---------------
FUZZ_SECONDS ?= 60
FUZZ_SRC   := $(wildcard tests/fuzz/*_fuzz.c)
FUZZ_BIN   := $(FUZZ_SRC:tests/fuzz/%.c=$(BUILD)/fuzz/%)
$(BUILD)/fuzz/%: $(BUILD)/obj/tests/fuzz/%.o $(call link_libs,$(LAYERS))
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) $(LDFLAGS) -fsanitize=fuzzer -o $@ $^ $(BASE_LIBS) $(UCX_LIBS)
.PHONY: fuzz fuzz-build fuzz-run
fuzz-build: $(FUZZ_BIN)
# One target a processor at a time; FUZZ_SECONDS each.
fuzz-run: fuzz-build
	@printf '%s\n' $(FUZZ_BIN) | xargs -P $$(nproc) -n 1 tests/fuzz/run-one $(FUZZ_SECONDS)
fuzz: packages-dev ## every fuzz target for FUZZ_SECONDS (60)
	@$(MAKE) CC=clang BUILD=build/fuzz OPT=-O1 SAN=address,undefined,fuzzer-no-link -j$$(nproc) fuzz-build
	@$(MAKE) CC=clang BUILD=build/fuzz OPT=-O1 SAN=address,undefined,fuzzer-no-link fuzz-run

# ---- helper programs of the tests: tests/support/<name>/main.c ---------------------------------------------------------------
SUPPORT_PROGS := $(patsubst tests/support/%/main.c,$(BUILD)/bin/%,$(wildcard tests/support/*/main.c))
$(SUPPORT_PROGS): $(BUILD)/bin/%: $(BUILD)/obj/tests/support/%/main.o $(call link_libs,$(WORKER_LAYERS))
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(BASE_LIBS) $(UCX_LIBS)
# Preloaded into daemons by tests: tests/support/preload/<name>.c. Made with the programs above.
SUPPORT_PRELOADS := $(patsubst tests/support/preload/%.c,$(BUILD)/lib/%.so,$(wildcard tests/support/preload/*.c))
$(SUPPORT_PRELOADS): $(BUILD)/lib/%.so: tests/support/preload/%.c
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) -std=c17 -g -O2 -D_GNU_SOURCE $(WARN) -fPIC -shared -o $@ $< -ldl
SUPPORT_PROGS += $(SUPPORT_PRELOADS)
# tests/bench: one program, a subcommand a row of commands.def.
BENCH_OBJ   := $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard tests/bench/*.c) tests/kernels/pair.c)
$(BUILD)/bin/tandem-bench: $(BENCH_OBJ) $(call link_libs,$(WORKER_LAYERS) decode)
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(BASE_LIBS) $(UCX_LIBS)
.PHONY: bench
bench: packages-bench ## build build/bin/tandem-bench and print the CPU's figures (ARGS='--only prefill'); its help lists the rest
	@$(MAKE) --no-print-directory -j$$(nproc) $(BUILD)/bin/tandem-bench
	@$(BUILD)/bin/tandem-bench cpu $(ARGS)

# ---- CUDA: the plug-in, where nvcc is ------------------------------------------------------------------------------------------
CU_SRC     := $(wildcard kernels/cuda/*.cu)
CU_C_SRC   := $(wildcard kernels/cuda/*.c)
CU_OBJ     := $(CU_SRC:%=$(BUILD)/obj/%.o) $(CU_C_SRC:%.c=$(BUILD)/obj/%.o)
# TUNE=one: one row of each tuning table, for a quick look at whether everything compiles.
NVCCFLAGS  := $(if $(TUNE),-DTD_TUNE_ONE=1) -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fPIC,-Wall -Werror all-warnings
CUDA_HOME  := $(patsubst %/bin/nvcc,%,$(NVCC))
ifneq ($(and $(NVCC),$(CU_SRC)),)
all: $(BUILD)/lib/libtandem-cuda.so
$(BUILD)/obj/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(call say,nvcc,$<)
	$(Q)$(NVCC) $(NVCCFLAGS) -I. -MMD -MP -c -o $@ $<
$(BUILD)/obj/kernels/cuda/%.o: kernels/cuda/%.c
	@mkdir -p $(@D)
	$(call say,cc  ,$<)
	$(Q)$(CC) -I. -isystem $(CUDA_HOME)/include -D_GNU_SOURCE -std=c17 -g $(OPT) $(WARN) -fPIC -pthread -MMD -MP -c -o $@ $<
$(BUILD)/lib/libtandem-cuda.so: $(CU_OBJ)
	@mkdir -p $(@D)
	$(call say,nvcc,$@)
	$(Q)$(NVCC) -shared -o $@ $^

# The same with mistakes planted (traps.cuh), for the tests: files that hold any are compiled again, one tuning row each.
TRAP_SRC   := $(filter-out kernels/cuda/o_proj.cu,$(shell grep -lE 'cuda/(traps|epilogue|product|moe_[a-z]+)\.cuh' $(CU_SRC) /dev/null))
TRAP_OBJ   := $(TRAP_SRC:%=$(BUILD)/obj/traps/%.o) $(filter-out $(TRAP_SRC:%=$(BUILD)/obj/%.o),$(CU_OBJ))
$(BUILD)/obj/traps/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(call say,nvcc,$< with mistakes planted)
	$(Q)$(NVCC) -DTD_TRAPS=1 $(if $(TUNE),,-DTD_TUNE_ONE=1) $(NVCCFLAGS) -I. -MMD -MP -c -o $@ $<

# A folder that needs nothing but a driver where it runs: checks, plug-in, checkpoint. GPU_HERE: this machine has one.
GPU_TREE   := $(BUILD)/gpu
GPU_LIBS   := $(call link_libs,common/base kernels common/loop common/coll common/model common/engine)
GPU_SHARED := $(addprefix tests/kernels/,pair.c golden.c ahead.c draws.c traps.c invariance.c moves.c planted.c experts_layer.c experts_modes.c)
GPU_STATIC := -l:libuv_a.a -l:libjansson.a -l:libxxhash.a -lm -ldl
GPU_HERE    = $(wildcard /dev/nvidia0)
$(GPU_TREE)/bin/%: $(BUILD)/obj/tests/kernels/%.o $(patsubst %.c,$(BUILD)/obj/%.o,$(GPU_SHARED)) $(GPU_LIBS)
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(GPU_STATIC)
$(GPU_TREE)/lib/libtandem-cuda.so: $(BUILD)/lib/libtandem-cuda.so
	@mkdir -p $(@D)
	$(Q)cp $< $@
$(GPU_TREE)/lib/libtandem-cudatraps.so: $(TRAP_OBJ)
	@mkdir -p $(@D)
	$(call say,nvcc,$@)
	$(Q)$(NVCC) -shared -o $@ $^
$(GPU_TREE)/.data: tests/kernels/run tests/tiny/goldens.json $(wildcard tests/tiny/tiny-model/*)
	@mkdir -p $(GPU_TREE)/tests/tiny
	$(Q)cp -r tests/tiny/tiny-model tests/tiny/goldens.json $(GPU_TREE)/tests/tiny/
	$(Q)cp tests/kernels/run $(GPU_TREE)/ && touch $@
.PHONY: gpu-tree
gpu-tree: $(GPU_TREE)/bin/cuda_test $(GPU_TREE)/bin/experts_test $(GPU_TREE)/lib/libtandem-cuda.so $(GPU_TREE)/.data
.PHONY: gpu-traps
gpu-traps: $(GPU_TREE)/lib/libtandem-cudatraps.so
endif
.PHONY: dist
dist: all $(BUILD)/bin/tandem-bench $(if $(NVCC),gpu-tree gpu-traps) ## build/dist: a tree that runs on another machine, at most 40 MiB, with a UCX that knows CUDA; CUDA and NCCL are that machine's
	@$(if $(NVCC),deploy/fetch-ucx $(BUILD)/ucx || echo "dist: goes on with this machine's UCX")
	@deploy/make-dist $(BUILD) $(BUILD)/dist
.PHONY: test-gpu
test-gpu: $(if $(NVCC),gpu-tree gpu-traps) ## check the CUDA kernels; without a GPU, make the folder build/gpu to run on one
ifeq ($(NVCC),)
	@echo "test-gpu: no nvcc on this machine, so there is nothing to test"
else
	@$(if $(GPU_HERE),$(GPU_TREE)/run,echo "test-gpu: no GPU here; copy $(GPU_TREE) to a machine with one and start ./run there")
endif

# ---- what people call -----------------------------------------------------------------------------------------------------------
MODEL      ?= tests/tiny/tiny-model
PROMPT     ?= What is 47 + 38?
RUN_DIR    ?= $(BUILD)/run
RUN_CTL    := $(BUILD)/bin/tandemctl
VENV       := build/venv
PYTEST     := $(VENV)/bin/python -m pytest
E2E_JOBS   ?= 2 # files of end-to-end tests at a time: most of them wait most of the time

.PHONY: help packages packages-test packages-bench packages-dev run run-built serve serve-built test test-built sim sim-seeds sim-built lint e2e venv asan asan-e2e tsan tsan-e2e soak clang format format-check tidy clean what
help:           ## this list
	@sed -n 's/^\([a-z][a-z0-9-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@echo "  CUDA=0 builds without CUDA; BUILD=dir, CC=clang, SAN=address,undefined choose another tree, compiler, sanitizer"

what:           ## say which optional parts this machine has
	@echo "CUDA: $(or $(NVCC),no)   UCX: $$($(PKG_CONFIG) --modversion ucx 2>/dev/null || echo no)   gRPC core: $$($(PKG_CONFIG) --modversion grpc 2>/dev/null || echo no)   compiler: $$($(CC) --version | head -1)"

packages:
	@deploy/install-packages build
packages-test:
	@deploy/install-packages build test
packages-bench:
	@deploy/install-packages build bench
packages-dev:
	@deploy/install-packages build test dev

run: packages   ## install what is missing, build, start a small cluster, ask a question (PROMPT='...')
	@$(MAKE) --no-print-directory -j$$(nproc) all
	@$(MAKE) --no-print-directory run-built
run-built:
	@BUILD=$(BUILD) RUN_DIR=$(RUN_DIR) MODEL='$(MODEL)' deploy/run-once '$(subst ','\'',$(PROMPT))'

serve: packages ## the same cluster, kept up until Ctrl-C
	@$(MAKE) --no-print-directory -j$$(nproc) all
	@$(RUN_CTL) up --model '$(MODEL)' --run-dir $(RUN_DIR)

test: packages-test ## lint, unit tests, simulated cluster, end-to-end tests
	@$(MAKE) --no-print-directory -j$$(nproc) what all unit-build $(SUPPORT_PROGS) $(SIM_BIN)
	@$(MAKE) --no-print-directory test-built
test-built: lint unit sim-built e2e

SEEDS      ?= 200
FIRST      ?= 1
sim:            ## the whole cluster on a virtual clock with seeded trouble (SEEDS=200, FIRST=1; SEED=7 replays one with a trace)
	@$(MAKE) --no-print-directory -j$$(nproc) $(SIM_BIN)
	@$(if $(SEED),$(SIM_BIN) --seed $(SEED) --trace $(ARGS),$(SIM_BIN) --seeds $(SEEDS) --first $(FIRST) $(ARGS))
# And that it sees mistakes: each planted one within 200 seeds.
sim-seeds: $(SIM_BIN)
	@$(SIM_BIN) --seeds $(SEEDS) --first $(FIRST)
sim-built: sim-seeds
	@for p in $$($(SIM_BIN) --plants); do $(SIM_BIN) --seeds 200 --plant $$p --caught || exit 1; done

lint:           ## layers, words
	@python3 tests/lint/layers.py
	@python3 tests/lint/words.py

$(VENV)/.done: tests/requirements.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check -r tests/requirements.txt
	@touch $@
venv: $(VENV)/.done
e2e: venv $(SUPPORT_PROGS) all ## end-to-end tests (pytest; ARGS='-k name')
	BUILD=$(BUILD) $(PYTEST) -q -n $(E2E_JOBS) --dist loadfile tests/cluster tests/kernels $(ARGS)

STREAMS    ?= 1000000
SOAK_FUZZ_SECONDS ?= 600
# Of each test that compares answers under random kills with those of a fleet left alone.
CHAOS_SECONDS ?= 600
soak: venv $(SUPPORT_PROGS) all $(BUILD)/unit/common/text/harmony_streams_test ## a million odd model outputs; random load while workers die: 200 kills, an hour (ARGS='--kills 20 --minutes 5 --seed 7'); then fuzz, SOAK_FUZZ_SECONDS (600) a target
	TANDEM_STREAMS=$(STREAMS) $(BUILD)/unit/common/text/harmony_streams_test
	BUILD=$(BUILD) HANDOFF_KILLS=100 $(PYTEST) -q tests/cluster/test_handoff.py -k killed
	BUILD=$(BUILD) $(VENV)/bin/python tests/cluster/soak.py $(ARGS)
	CHAOS_SECONDS=$(CHAOS_SECONDS) BUILD=$(BUILD) $(PYTEST) -q tests/cluster/test_migration.py -k random_kills
	@$(if $(filter 0,$(SOAK_FUZZ_SECONDS)),,$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=$(SOAK_FUZZ_SECONDS))

ASAN_ENV   := ASAN_OPTIONS=detect_leaks=1:abort_on_error=0:strict_string_checks=1 LSAN_OPTIONS=suppressions=$(CURDIR)/tests/support/lsan.supp:print_suppressions=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
asan: packages-dev ## unit tests and the simulated cluster under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(ASAN_ENV) $(MAKE) BUILD=build/asan SAN=address,undefined OPT=-O1 -j$$(nproc) unit-build
	@$(ASAN_ENV) $(MAKE) BUILD=build/asan SAN=address,undefined OPT=-O1 unit
	@$(ASAN_ENV) $(MAKE) BUILD=build/asan SAN=address,undefined OPT=-O1 SEEDS=100 sim-seeds
asan-e2e: packages-dev ## end-to-end tests with daemons under AddressSanitizer
	@$(ASAN_ENV) $(MAKE) BUILD=build/asan SAN=address,undefined OPT=-O1 -j$$(nproc) e2e
TSAN_ENV   := TSAN_OPTIONS="suppressions=$(CURDIR)/tests/support/tsan.supp ignore_noninstrumented_modules=1 halt_on_error=1 exitcode=66"
TSAN_MAKE   = $(TSAN_ENV) $(MAKE) CC=clang BUILD=build/tsan SAN=thread OPT=-O1
tsan: packages-dev ## unit tests under ThreadSanitizer
	@$(TSAN_MAKE) -j$$(nproc) unit-build
	@$(TSAN_MAKE) unit
tsan-e2e: packages-dev ## end-to-end tests with daemons under ThreadSanitizer
	@$(TSAN_MAKE) -j$$(nproc) all $(SUPPORT_PROGS:$(BUILD)/%=build/tsan/%)
	@$(TSAN_MAKE) e2e ARGS='$(or $(ARGS),-k "many_at_once or killed or cancel")'
clang: packages-dev ## everything once more with clang
	@$(MAKE) CC=clang BUILD=build/clang -j$$(nproc) all unit-build

SOURCES_C  = $(shell git ls-files '*.c' '*.h')
format:         ## clang-format 14 over the tree
	@clang-format-14 -i $(SOURCES_C)
format-check:   ## is the tree formatted
	@clang-format-14 --dry-run -Werror $(SOURCES_C)
tidy: $(GEN_H)  ## clang-tidy 14 over the sources
	@clang-tidy-14 --quiet $(filter-out tests/%,$(filter %.c,$(SOURCES_C))) -- $(CPPFLAGS) -std=c17

clean:          ## remove build/
	rm -rf build

-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
.SECONDARY:
