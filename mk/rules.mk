# Pattern rules: objects into $(BUILD), one archive a folder, one link line a program.
objects = $(patsubst %.c,$(BUILD)/%.o,$(1))

$(BUILD)/flags: FORCE
	$(Q)mkdir -p $(@D)
	$(Q)echo '$(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS)' | cmp -s - $@ || echo '$(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS)' > $@
.PHONY: FORCE

$(BUILD)/%.o: %.c $(BUILD)/flags
	$(Q)mkdir -p $(@D)
	@echo "  CC  $<"
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) $(CFLAGS_$(subst /,_,$*)) -MMD -MP -c $< -o $@

$(BUILD)/pic/%.o: %.c $(BUILD)/flags
	$(Q)mkdir -p $(@D)
	@echo "  CC  $< (pic)"
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) $(CFLAGS_$(subst /,_,$*)) -fPIC -fvisibility=hidden -MMD -MP -c $< -o $@

# Files of compute/cpu that are built for one instruction set; chosen at run time, see compute/cpu/.
CFLAGS_compute_cpu_avx2   := -mavx2 -mfma -mf16c
CFLAGS_compute_cpu_avx512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c

# A source that goes takes its object out of the archive.
ALL_SOURCES := $(foreach l,$(LIBS) $(DAEMONS) eval launch testlib,$(SRC_$(l)))
$(BUILD)/sources: FORCE
	$(Q)mkdir -p $(@D)
	$(Q)echo '$(ALL_SOURCES)' | cmp -s - $@ || echo '$(ALL_SOURCES)' > $@

define archive
$(BUILD)/lib$(1).a: $(call objects,$(SRC_$(1))) $(BUILD)/sources
	$(Q)mkdir -p $$(@D)
	$(Q)rm -f $$@
	$(Q)ar rcs $$@ $$(filter %.o,$$^)
endef
$(foreach l,$(LIBS) $(DAEMONS) eval launch testlib,$(eval $(call archive,$(l))))

LIB_ORDER := $(foreach l,compute model link proto base,$(BUILD)/lib$(l).a)

define daemon
$(BIN)/specontext-$(1): $(BUILD)/$(1)/main.o $(BUILD)/lib$(1).a $(LIB_ORDER) $(BUILD)/flags
	$(Q)mkdir -p $$(@D)
	@echo "  LD  $$@"
	$$(Q)$$(CC) $$(LDFLAGS) -o $$@ $$(filter %.o %.a,$$^) $$(PKG_LIBS) $$(LDLIBS)
endef
$(foreach d,$(DAEMONS),$(eval $(call daemon,$(d))))

$(BIN)/specontext-eval: $(BUILD)/eval/main.o $(ARCHIVES) $(BUILD)/flags
	$(Q)mkdir -p $(@D)
	@echo "  LD  $@"
	$(Q)$(CC) $(LDFLAGS) -o $@ $(filter %.o %.a,$^) $(PKG_LIBS) $(LDLIBS)

$(BIN)/specontext: $(BUILD)/launch/main.o $(BUILD)/liblaunch.a $(LIB_ORDER) $(BUILD)/flags
	$(Q)mkdir -p $(@D)
	@echo "  LD  $@"
	$(Q)$(CC) $(LDFLAGS) -o $@ $(filter %.o %.a,$^) $(PKG_LIBS) $(LDLIBS)

$(FAKEGPU): $(patsubst %.c,$(BUILD)/pic/%.o,$(SRC_fakegpu)) $(BUILD)/flags
	$(Q)mkdir -p $(@D)
	@echo "  LD  $@"
	$(Q)$(CC) $(LDFLAGS) -shared -Wl,--exclude-libs,ALL -o $@ $(filter %.o %.a,$^) -l:libxxhash.a $(LDLIBS)

$(BUILD)/tests/%: $(BUILD)/tests/%.o $(BUILD)/libtestlib.a $(ARCHIVES) $(BUILD)/flags
	$(Q)mkdir -p $(@D)
	@echo "  LD  $@"
	$(Q)$(CC) $(LDFLAGS) -o $@ $(filter %.o %.a,$^) -lcmocka $(PKG_LIBS) $(LDLIBS)

$(BUILD)/bench/%: $(BUILD)/bench/%.o $(ARCHIVES) $(BUILD)/flags
	$(Q)mkdir -p $(@D)
	@echo "  LD  $@"
	$(Q)$(CC) $(LDFLAGS) -o $@ $(filter %.o %.a,$^) $(PKG_LIBS) $(LDLIBS)

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
