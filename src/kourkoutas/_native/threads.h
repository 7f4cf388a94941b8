/* Work shared by the threads of a call.

   The framework's own OpenMP threads are used if OpenMP is loaded (its GOMP_parallel is looked up by name): others would
   fight its spinning workers for the cores. Without it, threads are made for the call. */

#include <dlfcn.h>
#include <pthread.h>

enum { MAX_THREADS = 256 };

typedef struct {
    void (*work)(void *);
    void *job;
} Call;

static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);

/* Looks for OpenMP's threads, or with `wanted` 0 lets go of them. */
static void find_openmp(int wanted) {
    gomp_parallel = !wanted ? NULL : (void (*)(void (*)(void *), void *, unsigned, unsigned))dlsym(RTLD_DEFAULT, "GOMP_parallel");
}

static void *run_call(void *argument) {
    Call *call = argument;
    call->work(call->job);
    return NULL;
}

/* Calls work(job) on each of `threads` threads, this one among them. */
static void parallel(void (*work)(void *), void *job, int threads) {
    if (threads <= 1) {
        work(job);
        return;
    }
    if (gomp_parallel) {
        gomp_parallel(work, job, (unsigned)threads, 0);
        return;
    }
    pthread_t made[MAX_THREADS];
    Call call = {work, job};
    int n = 0;
    while (n < threads - 1 && n < MAX_THREADS && !pthread_create(&made[n], NULL, run_call, &call)) n++;
    work(job);
    while (n) pthread_join(made[--n], NULL);
}
