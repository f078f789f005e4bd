/* Shows a program another processor: Linux delivers each CPUID instruction as SIGSEGV, and the answer is changed.
 *
 * cc -O1 -shared -fPIC -o processor.so processor.c; PROCESSOR=sse4.2,amd LD_PRELOAD=./processor.so PROGRAM
 *
 * PROCESSOR names the newest instruction set, avx512 (without AMX), avx2 or sse4.2, and amd for another maker, whose
 * caches are described by other leaves. It needs a processor with the flag cpuid_fault in /proc/cpuinfo.
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_CPUID_SET 0x1012

static int has_avx512, has_avx2, is_amd;

static void answer_cpuid(unsigned leaf, unsigned subleaf, unsigned *a, unsigned *b, unsigned *c, unsigned *d) {
  __cpuid_count(leaf, subleaf, *a, *b, *c, *d);
  if (leaf == 0 && is_amd) *b = signature_AMD_ebx, *c = signature_AMD_ecx, *d = signature_AMD_edx;
  if (leaf == 1 && is_amd) *a = 0x00A20F10; /* Zen 3 */
  if (leaf == 1 && !has_avx2) *c &= ~(bit_FMA | bit_AVX | bit_F16C);
  if (leaf == 4 && is_amd) *a = *b = *c = *d = 0; /* no description of the caches */
  if (leaf == 7) {
    if (!has_avx512) *b &= ~(bit_AVX512F | bit_AVX512DQ | bit_AVX512IFMA | bit_AVX512CD | bit_AVX512BW | bit_AVX512VL);
    if (!has_avx512) *c &= (1u << 5) - 1, *a &= ~0x30u; /* VBMI and later; AVX-VNNI, AVX512-BF16 */
    *d &= ~((1u << 22) | (1u << 24) | (1u << 25) | (has_avx512 ? 0 : (1u << 23 | 1u << 2 | 1u << 3 | 1u << 8))); /* AMX */
    if (!has_avx2) *b &= ~(bit_AVX2 | bit_BMI | bit_BMI2);
  }
}

static void on_fault(int number, siginfo_t *info, void *context) {
  greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
  const unsigned char *code = (const unsigned char *)r[REG_RIP];
  unsigned a, b, c, d;
  if (code[0] != 0x0F || code[1] != 0xA2) {
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  syscall(SYS_arch_prctl, ARCH_CPUID_SET, 1);
  answer_cpuid(r[REG_RAX], r[REG_RCX], &a, &b, &c, &d);
  syscall(SYS_arch_prctl, ARCH_CPUID_SET, 0);
  r[REG_RAX] = a, r[REG_RBX] = b, r[REG_RCX] = c, r[REG_RDX] = d;
  r[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
  const char *name = getenv("PROCESSOR");
  if (!name) return;
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
  has_avx512 = strstr(name, "avx512") != NULL;
  has_avx2 = has_avx512 || strstr(name, "avx2") != NULL;
  is_amd = strstr(name, "amd") != NULL;
  sigaction(SIGSEGV, &action, NULL);
  if (syscall(SYS_arch_prctl, ARCH_CPUID_SET, 0)) {
    static const char text[] = "processor.so: this processor has no cpuid_fault\n";
    if (write(2, text, sizeof text - 1)) _exit(2);
  }
}
