/* Turns the matrix registers of Intel's AMX on and off, for all kernels and threads of the process. */
#include "amx.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

int64_t quire_amx_uses = 0;

/* Asks the system for the registers' memory, which it gives only to a process that asks. */
static bool is_permitted(void)
{
#if defined(AMX_EMULATION)
    return true;
#elif defined(HAS_AMX) && defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

/* Has the uses in this set of bits use them from now on; returns whether any does: not if the library,
 * or this system, has no such instructions. No kernel may run meanwhile. */
bool quire_use_amx(int64_t uses)
{
    quire_amx_uses = uses && is_permitted() ? uses : 0;
    return quire_amx_uses;
}
