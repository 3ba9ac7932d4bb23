/* Put before the C library by LD_PRELOAD: files whose names say how they fail.

   A path with "EIO" in it fails to be read, one with "HANG" is never read, one with "SLOW" is
   read after a second. With FAIL_RENAME in the environment, no file gets the name of a shard. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

ssize_t read(int descriptor, void *buffer, size_t size) {
  static ssize_t (*real)(int, void *, size_t);
  char link[64], path[4096];
  ssize_t length;
  if (!real) real = dlsym(RTLD_NEXT, "read");
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  length = readlink(link, path, sizeof path - 1);
  if (length > 0) {
    path[length] = 0;
    if (strstr(path, "EIO")) {
      errno = EIO;
      return -1;
    }
    while (strstr(path, "HANG")) pause();
    if (strstr(path, "SLOW")) sleep(1);
  }
  return real(descriptor, buffer, size);
}

int rename(const char *from, const char *to) {
  static int (*real)(const char *, const char *);
  const char *end = strstr(to, ".tfrecord");
  if (!real) real = dlsym(RTLD_NEXT, "rename");
  if (getenv("FAIL_RENAME") && end && !end[9]) {
    errno = EIO;
    return -1;
  }
  return real(from, to);
}
