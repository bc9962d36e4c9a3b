/* LD_PRELOAD: the wall clock as CLOCK_FILE says, a signed 64-bit number of seconds to add, read anew at each look. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t added(void) {
  static volatile int64_t *offset;
  if (!offset) {
    const char *path = getenv("CLOCK_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    void *mapped = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return 0;
    offset = mapped;
  }
  return *offset;
}

int clock_gettime(clockid_t id, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, id, now);
  if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += added();
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  struct timespec read;
  if (clock_gettime(CLOCK_REALTIME, &read)) return -1;
  now->tv_sec = read.tv_sec;
  now->tv_usec = read.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec read;
  clock_gettime(CLOCK_REALTIME, &read);
  if (now) *now = read.tv_sec;
  return read.tv_sec;
}
