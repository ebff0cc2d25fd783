/* Included before the C core by the fuzz tests: RING_KILL_POINT names a step, RING_KILL_AFTER how many times it is
 * passed before the process kills itself there. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void ring_point(const char *step) {
    const char *wanted = getenv("RING_KILL_POINT");
    static long left = -1;
    if (!wanted || strcmp(wanted, step)) return;
    if (left < 0) left = atol(getenv("RING_KILL_AFTER"));
    if (left-- == 0) kill(getpid(), SIGKILL);
}

#define RING_POINT(step) ring_point(#step)
