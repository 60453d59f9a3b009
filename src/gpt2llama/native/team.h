// Threads that walk through the same work and meet where one needs what another has made.

#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

typedef struct {
    int threads;
    atomic_uint arrived, phase;       // at the meeting that comes next
    atomic_uint call, asleep, leave;  // a call for everybody; who is not looking; the last call
    pthread_mutex_t lock;
    pthread_cond_t wake;
    void (*job)(void *, int);
    void *argument;
    pthread_t thread[];
} Team;

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

typedef struct {
    Team *team;
    int me;
} Member;

static void *member(void *argument) {
    Member who = *(Member *)argument;
    Team *t = who.team;
    free(argument);
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
        t->job(t->argument, who.me);
    }
}

static void together(Team *t, void (*job)(void *, int), void *argument) {
    t->job = job, t->argument = argument;
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
        pthread_join(t->thread[i], NULL);
    free(t);
}

// The caller is the first of the threads. NULL: the system gives no more.
Team *team_new(int threads) {
    Team *t = calloc(1, sizeof *t + (size_t)threads * sizeof(pthread_t));
    if (!t)
        return NULL;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->wake, NULL);
    for (t->threads = 1; t->threads < threads; t->threads++) {
        Member *who = malloc(sizeof *who);
        if (who)
            *who = (Member){t, t->threads};
        if (!who || pthread_create(&t->thread[t->threads], NULL, member, who)) {
            free(who);
            team_free(t);
            return NULL;
        }
    }
    return t;
}
