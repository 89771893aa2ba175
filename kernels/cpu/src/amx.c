/* Turns Intel's AMX on and off, for all kernels and threads of the process. */
#include "amx.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

int64_t quire_amx_uses = 0;

/* Asks the system for the memory of the registers, which only a process that asks for it gets. */
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

/* Turns AMX on for the uses in this set of bits, and off for all others. Returns whether it is on for any
 * use; it never is if the library or the system does not support AMX. No kernel may run meanwhile. */
bool quire_use_amx(int64_t uses)
{
    quire_amx_uses = uses && is_permitted() ? uses : 0;
    return quire_amx_uses;
}
