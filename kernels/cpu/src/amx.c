/* Turns the matrix registers of Intel's AMX on and off, for all kernels and threads of the process. */
#include "amx.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

int64_t quire_amx_formats = 0;

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

/* Has maps use them from now on, whose weights have a format in this set of bits; returns whether any
 * do: not if the library, or this system, has no such instructions. No kernel may run meanwhile. */
bool quire_use_amx(int64_t formats)
{
    quire_amx_formats = formats && is_permitted() ? formats : 0;
    return quire_amx_formats;
}
