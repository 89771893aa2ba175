/* Turns Intel's AMX on and off, for all kernels and threads of the process. */
#include "amx.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

int64_t quire_amx_uses = 0;

/* Asks the system to let this process use AMX's registers. Returns whether the process may use them. */
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

/* Sets which operations use AMX; `uses` is a set of bits like `quire_amx_uses` (amx.h). Returns whether
 * AMX is on for any operation. AMX stays off if the library or the system does not support it. No kernel
 * may run during this call. */
bool quire_use_amx(int64_t uses)
{
    quire_amx_uses = uses && is_permitted() ? uses : 0;
    return quire_amx_uses;
}
