/* Count the file-system calls below one folder, and make one of them fail: preload this library, then call fault_arm.
 *
 * Python, safetensors (Rust) and libc's own streams all reach the kernel through these functions of libc.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, KILL, ENOSPC_ON, EIO_WRITE, SHORT_WRITE, EIO_READ, EMFILE_ON };
enum { CREATE = 'c', OPEN = 'o', WRITE = 'w', READ = 'r', CHANGE = 'm', SYNC = 'f', LOOK = 's' }; /* kinds of calls */

static char root[PATH_MAX];
static size_t root_length;
static long at, count;
static int fault, full; /* full: the disk has no space from the fault on */
static char record[1 << 22];
static size_t recorded;

void fault_arm(const char *folder, long call, int kind) {
    root_length = strlen(folder);
    memcpy(root, folder, root_length + 1);
    at = call, fault = kind, count = 0, full = 0, recorded = 0;
}

/* Stop counting. Return one line per call: its kind, the function and the path below the folder. */
const char *fault_disarm(void) {
    root_length = 0;
    record[recorded] = 0;
    return record;
}

static int below(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int name_of(int fd, char *path) {
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
    return length > 0;
}

/* Return 0 if the call may go on, -1 with errno if it fails, and 1 if it must be a short write. */
static int meet(int kind, const char *function, const char *path) {
    if (!below(path))
        return 0;
    if (recorded < sizeof record - PATH_MAX - 64)
        recorded += snprintf(record + recorded, PATH_MAX + 64, "%c %s %s\n", kind, function, path + root_length);
    int writes = kind == CREATE || kind == WRITE || kind == CHANGE || kind == SYNC, hit = count++ == at;
    if (hit && fault == KILL)
        syscall(SYS_kill, getpid(), SIGKILL);
    if (hit && fault == ENOSPC_ON)
        full = 1;
    if (full && (kind == CREATE || kind == WRITE || kind == SYNC || !strcmp(function, "mkdir")))
        return errno = ENOSPC, -1;
    if (hit && ((fault == EIO_WRITE && writes) || (fault == EIO_READ && !writes)))
        return errno = EIO, -1;
    if (hit && fault == EMFILE_ON && (kind == CREATE || kind == OPEN))
        return errno = EMFILE, -1;
    return hit && fault == SHORT_WRITE && kind == WRITE;
}

static int meet_at(int kind, const char *function, int dir, const char *path) {
    if (!root_length)
        return 0;
    char whole[2 * PATH_MAX] = "";
    int saved = errno;
    if (path[0] != '/') {
        if (dir == AT_FDCWD)
            syscall(SYS_getcwd, whole, PATH_MAX);
        else
            name_of(dir, whole);
        strncat(whole, "/", 2);
    }
    strncat(whole, path, PATH_MAX - 1);
    errno = saved;
    return meet(kind, function, whole);
}

static int meet_fd(int kind, const char *function, int fd) {
    char path[PATH_MAX];
    int saved = errno;
    if (!root_length || !name_of(fd, path))
        return errno = saved, 0;
    errno = saved;
    return meet(kind, function, path);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)
#define OPENING(flags) ((flags) & (O_CREAT | O_TRUNC) ? CREATE : OPEN)

#define DEFINE_OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = va_arg(list, mode_t); \
        va_end(list); \
        return meet_at(OPENING(flags), "open", AT_FDCWD, path) < 0 ? -1 : real(path, flags, mode); \
    }
#define DEFINE_OPENAT(name) \
    int name(int dir, const char *path, int flags, ...) { \
        REAL(name); \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = va_arg(list, mode_t); \
        va_end(list); \
        return meet_at(OPENING(flags), "open", dir, path) < 0 ? -1 : real(dir, path, flags, mode); \
    }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

#define DEFINE_FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(name); \
        return meet_at(mode[0] == 'r' ? OPEN : CREATE, "open", AT_FDCWD, path) < 0 ? NULL : real(path, mode); \
    }
DEFINE_FOPEN(fopen)
DEFINE_FOPEN(fopen64)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    int met = meet_fd(WRITE, "write", fd);
    return met < 0 ? -1 : real(fd, data, met && size > 1 ? size / 2 : size);
}

ssize_t writev(int fd, const struct iovec *parts, int n) {
    REAL(writev);
    int met = meet_fd(WRITE, "writev", fd);
    return met < 0 ? -1 : real(fd, parts, met && n > 1 ? n / 2 : n);
}

#define DEFINE_PWRITE(name, offset_type) \
    ssize_t name(int fd, const void *data, size_t size, offset_type offset) { \
        REAL(name); \
        int met = meet_fd(WRITE, "pwrite", fd); \
        return met < 0 ? -1 : real(fd, data, met && size > 1 ? size / 2 : size, offset); \
    }
DEFINE_PWRITE(pwrite, off_t)
DEFINE_PWRITE(pwrite64, off64_t)

ssize_t read(int fd, void *data, size_t size) {
    REAL(read);
    return meet_fd(READ, "read", fd) < 0 ? -1 : real(fd, data, size);
}

#define DEFINE_PREAD(name, offset_type) \
    ssize_t name(int fd, void *data, size_t size, offset_type offset) { \
        REAL(name); \
        return meet_fd(READ, "pread", fd) < 0 ? -1 : real(fd, data, size, offset); \
    }
DEFINE_PREAD(pread, off_t)
DEFINE_PREAD(pread64, off64_t)

#define DEFINE_MMAP(name, offset_type) \
    void *name(void *address, size_t size, int protection, int flags, int fd, offset_type offset) { \
        REAL(name); \
        if (fd >= 0 && meet_fd(READ, "mmap", fd) < 0) \
            return MAP_FAILED; \
        return real(address, size, protection, flags, fd, offset); \
    }
DEFINE_MMAP(mmap, off_t)
DEFINE_MMAP(mmap64, off64_t)

#define DEFINE_FD(name, kind) \
    int name(int fd) { \
        REAL(name); \
        return meet_fd(kind, #name, fd) < 0 ? -1 : real(fd); \
    }
DEFINE_FD(fsync, SYNC)
DEFINE_FD(fdatasync, SYNC)

#define DEFINE_PATH(name, kind) \
    int name(const char *path) { \
        REAL(name); \
        return meet_at(kind, #name, AT_FDCWD, path) < 0 ? -1 : real(path); \
    }
DEFINE_PATH(unlink, CHANGE)
DEFINE_PATH(rmdir, CHANGE)

int unlinkat(int dir, const char *path, int flags) {
    REAL(unlinkat);
    return meet_at(CHANGE, "unlink", dir, path) < 0 ? -1 : real(dir, path, flags);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    return meet_at(CHANGE, "rename", AT_FDCWD, from) < 0 ? -1 : real(from, to);
}

int renameat(int dir, const char *from, int other, const char *to) {
    REAL(renameat);
    return meet_at(CHANGE, "rename", dir, from) < 0 ? -1 : real(dir, from, other, to);
}

int renameat2(int dir, const char *from, int other, const char *to, unsigned flags) {
    REAL(renameat2);
    return meet_at(CHANGE, "rename", dir, from) < 0 ? -1 : real(dir, from, other, to, flags);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return meet_at(CHANGE, "mkdir", AT_FDCWD, path) < 0 ? -1 : real(path, mode);
}

int mkdirat(int dir, const char *path, mode_t mode) {
    REAL(mkdirat);
    return meet_at(CHANGE, "mkdir", dir, path) < 0 ? -1 : real(dir, path, mode);
}

int chmod(const char *path, mode_t mode) {
    REAL(chmod);
    return meet_at(CHANGE, "chmod", AT_FDCWD, path) < 0 ? -1 : real(path, mode);
}

int fchmod(int fd, mode_t mode) {
    REAL(fchmod);
    return meet_fd(CHANGE, "chmod", fd) < 0 ? -1 : real(fd, mode);
}

int fchmodat(int dir, const char *path, mode_t mode, int flags) {
    REAL(fchmodat);
    return meet_at(CHANGE, "chmod", dir, path) < 0 ? -1 : real(dir, path, mode, flags);
}

#define DEFINE_TRUNCATE(name, offset_type) \
    int name(int fd, offset_type size) { \
        REAL(name); \
        return meet_fd(WRITE, "truncate", fd) < 0 ? -1 : real(fd, size); \
    }
DEFINE_TRUNCATE(ftruncate, off_t)
DEFINE_TRUNCATE(ftruncate64, off64_t)

#define DEFINE_STAT(name, type) \
    int name(const char *path, struct type *found) { \
        REAL(name); \
        return meet_at(LOOK, "stat", AT_FDCWD, path) < 0 ? -1 : real(path, found); \
    }
DEFINE_STAT(stat, stat)
DEFINE_STAT(stat64, stat64)
DEFINE_STAT(lstat, stat)
DEFINE_STAT(lstat64, stat64)

#define DEFINE_FSTATAT(name, type) \
    int name(int dir, const char *path, struct type *found, int flags) { \
        REAL(name); \
        int failed = path[0] ? meet_at(LOOK, "stat", dir, path) : meet_fd(LOOK, "stat", dir); \
        return failed < 0 ? -1 : real(dir, path, found, flags); \
    }
DEFINE_FSTATAT(fstatat, stat)
DEFINE_FSTATAT(fstatat64, stat64)

#define DEFINE_FSTAT(name, type) \
    int name(int fd, struct type *found) { \
        REAL(name); \
        return meet_fd(LOOK, "stat", fd) < 0 ? -1 : real(fd, found); \
    }
DEFINE_FSTAT(fstat, stat)
DEFINE_FSTAT(fstat64, stat64)

int statx(int dir, const char *path, int flags, unsigned mask, struct statx *found) {
    REAL(statx);
    int failed = path[0] ? meet_at(LOOK, "stat", dir, path) : meet_fd(LOOK, "stat", dir);
    return failed < 0 ? -1 : real(dir, path, flags, mask, found);
}

DIR *opendir(const char *path) {
    REAL(opendir);
    return meet_at(OPEN, "opendir", AT_FDCWD, path) < 0 ? NULL : real(path);
}

DIR *fdopendir(int fd) {
    REAL(fdopendir);
    return meet_fd(OPEN, "opendir", fd) < 0 ? NULL : real(fd);
}

#define DEFINE_READDIR(name, type) \
    struct type *name(DIR *folder) { \
        REAL(name); \
        return meet_fd(READ, "readdir", dirfd(folder)) < 0 ? NULL : real(folder); \
    }
DEFINE_READDIR(readdir, dirent)
DEFINE_READDIR(readdir64, dirent64)

int flock(int fd, int operation) {
    REAL(flock);
    return meet_fd(LOOK, "flock", fd) < 0 ? -1 : real(fd, operation);
}
