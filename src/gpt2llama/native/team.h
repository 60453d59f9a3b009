// Threads that walk through the same work and meet where one needs what another has made.

#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int threads;
    atomic_uint arrived, phase;       // at the meeting that comes next
    atomic_uint call, asleep, leave;  // a call for everybody; who is not looking; the last call
    pthread_mutex_t lock;
    pthread_cond_t wake;
    void (*job)(void *, int);
    void *argument;
    struct Member *member;
} Team;

// Work is cut into pieces. Each thread has a run of them, and whoever is done takes from the others.
typedef struct Member {
    _Alignas(64) atomic_llong taken; // the last job from whose run here something was taken; how much
    Team *team;
    pthread_t thread;
} Member;

#define JOB (1ll << 32)

// Spins while the wait should be short; then lets others have this core, on which perhaps the one
// that is waited for wants to run.
static void relax(int tries) {
    if (tries > 4000)
        sched_yield();
#if defined(__x86_64__)
    else
        __builtin_ia32_pause();
#endif
}

// Everybody waits for everybody; what was written before is seen by all after it.
static void meet(Team *t) {
    const unsigned phase = atomic_load(&t->phase);
    if (atomic_fetch_add(&t->arrived, 1) + 1 == (unsigned)t->threads) {
        atomic_store(&t->arrived, 0);
        atomic_store(&t->phase, phase + 1);
        return;
    }
    for (int tries = 0; atomic_load_explicit(&t->phase, memory_order_acquire) == phase; tries++)
        relax(tries);
}

// A piece that nobody has taken, or -1. All threads count jobs (1, 2, …) alike, and come to the next
// when this one has no pieces left: who finds a later job in a run knows that there is nothing left.
static int64_t take(Team *t, int me, int64_t job, int64_t pieces) {
    for (int i = 0; i < t->threads; i++) {
        const int whose = (me + i) % t->threads;
        const int64_t first = pieces * whose / t->threads;
        const int64_t count = pieces * (whose + 1) / t->threads - first;
        atomic_llong *taken = &t->member[whose].taken;
        long long seen = atomic_load_explicit(taken, memory_order_relaxed);
        while (count && seen < job * JOB + count) {
            const int64_t done = seen < job * JOB ? 0 : seen % JOB;
            if (atomic_compare_exchange_weak_explicit(taken, &seen, job * JOB + done + 1,
                                                      memory_order_relaxed, memory_order_relaxed))
                return first + done;
        }
    }
    return -1;
}

static void *member(void *argument) {
    const Member *self = argument;
    Team *t = self->team;
    for (unsigned seen = 0;; seen++) {
        for (int tries = 0; atomic_load(&t->call) == seen && tries < 40000; tries++)
            relax(tries);
        pthread_mutex_lock(&t->lock);
        atomic_fetch_add(&t->asleep, 1);
        while (atomic_load(&t->call) == seen)
            pthread_cond_wait(&t->wake, &t->lock);
        atomic_fetch_sub(&t->asleep, 1);
        pthread_mutex_unlock(&t->lock);
        if (atomic_load(&t->leave))
            return NULL;
        t->job(t->argument, (int)(self - t->member));
    }
}

static void together(Team *t, void (*job)(void *, int), void *argument) {
    t->job = job, t->argument = argument;
    for (int i = 0; i < t->threads; i++)
        atomic_store_explicit(&t->member[i].taken, 0, memory_order_relaxed);
    atomic_fetch_add(&t->call, 1);
    if (atomic_load(&t->asleep)) {
        pthread_mutex_lock(&t->lock);
        pthread_cond_broadcast(&t->wake);
        pthread_mutex_unlock(&t->lock);
    }
    if (job)
        job(argument, 0);
}

void team_free(Team *t) {
    atomic_store(&t->leave, 1);
    together(t, NULL, NULL);
    for (int i = 1; i < t->threads; i++)
        pthread_join(t->member[i].thread, NULL);
    free(t->member);
    free(t);
}

// The caller is the first of the threads. NULL: the system gives no more.
Team *team_new(int threads) {
    Team *t = calloc(1, sizeof *t);
    Member *members = aligned_alloc(_Alignof(Member), (size_t)threads * sizeof *members);
    if (!t || !members) {
        free(t);
        free(members);
        return NULL;
    }
    memset(members, 0, (size_t)threads * sizeof *members);
    t->member = members;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->wake, NULL);
    for (t->threads = 1; t->threads < threads; t->threads++) {
        Member *who = members + t->threads;
        who->team = t;
        if (pthread_create(&who->thread, NULL, member, who)) {
            team_free(t);
            return NULL;
        }
    }
    return t;
}
