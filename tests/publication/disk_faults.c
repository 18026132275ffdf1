/* Preloaded into a process, makes chosen system calls fail on chosen files, for as long as a control file says so.
 *
 * The control file (named by FAULT_CONTROL) holds "CALL PATTERN ERRNO COUNT": CALL is sync or write, PATTERN a part of
 * the file's path (its end, if the pattern ends in "$"), COUNT how many calls fail (0: all). No control file, no fault. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int matches(const char *path, char *pattern) {
    size_t length = strlen(pattern), whole = strlen(path);
    if (!length || pattern[length - 1] != '$') return strstr(path, pattern) != NULL;
    pattern[--length] = 0;
    return whole >= length && !strcmp(path + whole - length, pattern);
}

static int fails(const char *call, int descriptor) {
    static int done;
    const char *control = getenv("FAULT_CONTROL");
    char text[512] = {0}, wanted[16], pattern[256], link[64], path[1024] = {0};
    int code, count, saved = errno;
    if (!control) return 0;
    int file = open(control, O_RDONLY);
    if (file < 0) { done = 0; errno = saved; return 0; }
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    errno = saved;
    if (length <= 0 || sscanf(text, "%15s %255s %d %d", wanted, pattern, &code, &count) != 4) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    if (strcmp(wanted, call) || readlink(link, path, sizeof path - 1) < 0 || !matches(path, pattern)) {
        errno = saved;
        return 0;
    }
    if (count && done >= count) { errno = saved; return 0; }
    done++;
    errno = code;
    return 1;
}

#define REAL(name, type) static type real; if (!real) real = (type)dlsym(RTLD_NEXT, #name)

int fsync(int descriptor) {
    typedef int (*call)(int);
    REAL(fsync, call);
    return fails("sync", descriptor) ? -1 : real(descriptor);
}

int fdatasync(int descriptor) {
    typedef int (*call)(int);
    REAL(fdatasync, call);
    return fails("sync", descriptor) ? -1 : real(descriptor);
}

#define WRITER(name, offset_type)                                                              \
    ssize_t name(int descriptor, const void *data, size_t size, offset_type offset) {          \
        typedef ssize_t (*call)(int, const void *, size_t, offset_type);                       \
        REAL(name, call);                                                                      \
        return fails("write", descriptor) ? -1 : real(descriptor, data, size, offset);         \
    }
WRITER(pwrite, off_t)
WRITER(pwrite64, off64_t)

ssize_t write(int descriptor, const void *data, size_t size) {
    typedef ssize_t (*call)(int, const void *, size_t);
    REAL(write, call);
    return fails("write", descriptor) ? -1 : real(descriptor, data, size);
}
