"""List the Linux system calls that a sandboxed kernel may and may not make, with their numbers on each machine.

Each entry is a name, its number on x86-64, and its number on AArch64, or `-` where the machine lacks the call.

Source: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux 6.1.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SystemCall:
    """A system call with its numbers; None on a machine that lacks it."""

    name: str
    x86_64: int | None
    aarch64: int | None


def _parse(table: str) -> tuple[SystemCall, ...]:
    """Parse entries of the form `name x86_64 aarch64`, separated by commas."""
    entries = (entry.split() for entry in table.replace("\n", " ").split(","))
    return tuple(
        SystemCall(name, *(None if text == "-" else int(text) for text in numbers)) for name, *numbers in entries
    )


FILES = _parse("""
read 0 63, write 1 64, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69, pwritev 296 70,
preadv2 327 286, pwritev2 328 287, open 2 -, openat 257 56, openat2 437 437, creat 85 -, close 3 57,
close_range 436 436, lseek 8 62, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -,
faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61,
getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -,
mkdirat 258 34, rmdir 84 -, link 86 -, linkat 265 37, unlink 87 -, unlinkat 263 35, symlink 88 -,
symlinkat 266 36, mknod 133 -, mknodat 259 33, umask 95 166, truncate 76 45, ftruncate 77 46, fallocate 285 47,
fadvise64 221 223, readahead 187 213, fsync 74 82, fdatasync 75 83, sync_file_range 277 84, flock 73 32,
sendfile 40 71, splice 275 76, tee 276 77, copy_file_range 326 285, statfs 137 43, fstatfs 138 44,
getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13,
dup 32 23, dup2 33 -, dup3 292 24, fcntl 72 25, pipe 22 -, pipe2 293 59, memfd_create 319 279
""")
MEMORY = _parse("""
brk 12 214, mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, msync 26 227, mincore 27 232,
madvise 28 233, mlock 149 228, mlock2 325 284, munlock 150 229, mlockall 151 230, munlockall 152 231,
mbind 237 235, set_mempolicy 238 237, get_mempolicy 239 236, pkey_mprotect 329 288, pkey_alloc 330 289,
pkey_free 331 290, membarrier 324 283
""")
PROCESSES = _parse("""
fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, exit 60 93, exit_group 231 94, wait4 61 260,
waitid 247 95, kill 62 129, tkill 200 130, tgkill 234 131, getpid 39 172, getppid 110 173, gettid 186 178,
getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148,
getresgid 120 150, getpgrp 111 -, getpgid 121 155, setpgid 109 154, getsid 124 156, setsid 112 157,
capget 125 90, prctl 157 167, arch_prctl 158 -, set_tid_address 218 96, set_robust_list 273 99,
get_robust_list 274 100, rseq 334 293, futex 202 98, futex_waitv 449 449, sched_yield 24 124,
sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120, sched_getattr 315 275,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, sched_rr_get_interval 148 127,
getpriority 140 141, ioprio_get 252 31, getcpu 309 168, getrlimit 97 163, setrlimit 160 164, getrusage 98 165,
times 100 153, sysinfo 99 179, uname 63 160, restart_syscall 219 128
""")
SIGNALS = _parse("""
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -,
signalfd 282 -, signalfd4 289 74
""")
TIME = _parse("""
time 201 -, gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
nanosleep 35 101, alarm 37 -, getitimer 36 102, setitimer 38 103, timer_create 222 107, timer_settime 223 110,
timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111, timerfd_create 283 85,
timerfd_settime 286 86, timerfd_gettime 287 87, getrandom 318 278
""")
WAITING = _parse("""
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19
""")
ALLOWED = (*FILES, *MEMORY, *PROCESSES, *SIGNALS, *TIME, *WAITING)
"""Calls that are allowed with any arguments: they work on files, memory, time and the process itself."""

IGNORED = _parse("""
chmod 90 -, fchmod 91 52, fchmodat 268 53
""")
"""Calls that set modes of files. They report success and do nothing.

Landlock cannot confine them to a folder, and programs that copy files make them.
"""

UNSUPPORTED = _parse("""
setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16
""")
"""Calls that set extended attributes. They fail as on a file system without such attributes."""

CHECKED = _parse("""
clone 56 220, ioctl 16 29, prlimit64 302 261
""")
"""Calls that are allowed for some arguments (`conformance.sandbox.seccomp`)."""

UNIX_SERVER = _parse("""
socket 41 198, bind 49 200, listen 50 201, accept 43 202, accept4 288 242, getsockname 51 204,
getsockopt 55 209, setsockopt 54 208, shutdown 48 210
""")
"""Calls by which a process serves a Unix socket. They are allowed on machines with NVIDIA's driver.

It was not tested whether the driver works without them.
"""

FALLBACK = _parse("""
clone3 435 435
""")
"""Calls whose arguments a filter cannot read. They fail as on an older Linux, so that libc makes the older call."""

FORBIDDEN = _parse("""
utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88,
shmget 29 194, shmat 30 196, shmctl 31 195, connect 42 203, sendto 44 206, recvfrom 45 207, sendmsg 46 211,
recvmsg 47 212, getpeername 52 205, socketpair 53 199, semget 64 190, semop 65 193, semctl 66 191, shmdt 67 197,
msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, chown 92 -, fchown 93 55, lchown 94 -,
ptrace 101 117, syslog 103 116, setuid 105 146, setgid 106 144, setreuid 113 145, setregid 114 143,
setgroups 116 159, setresuid 117 147, setresgid 119 149, setfsuid 122 151, setfsgid 123 152, capset 126 91,
personality 135 92, setpriority 141 140, sched_setparam 142 118, sched_setscheduler 144 119, vhangup 153 58,
modify_ldt 154 -, pivot_root 155 41, adjtimex 159 171, chroot 161 51, sync 162 81, acct 163 89,
settimeofday 164 170, mount 165 40, umount2 166 39, swapon 167 224, swapoff 168 225, reboot 169 142,
sethostname 170 161, setdomainname 171 162, iopl 172 -, ioperm 173 -, init_module 175 105,
delete_module 176 106, quotactl 179 60, sched_setaffinity 203 122, set_thread_area 205 -, io_setup 206 0,
io_destroy 207 1, io_getevents 208 4, io_submit 209 2, io_cancel 210 3, get_thread_area 211 -,
lookup_dcookie 212 18, remap_file_pages 216 234, semtimedop 220 192, clock_settime 227 112, mq_open 240 180,
mq_unlink 241 181, mq_timedsend 242 182, mq_timedreceive 243 183, mq_notify 244 184, mq_getsetattr 245 185,
kexec_load 246 104, add_key 248 217, request_key 249 218, keyctl 250 219, ioprio_set 251 30, inotify_init 253 -,
inotify_add_watch 254 27, inotify_rm_watch 255 28, migrate_pages 256 238, fchownat 260 54, unshare 272 97,
vmsplice 278 75, move_pages 279 239, inotify_init1 294 26, perf_event_open 298 241, recvmmsg 299 243,
fanotify_init 300 262, fanotify_mark 301 263, name_to_handle_at 303 -, open_by_handle_at 304 -,
clock_adjtime 305 266, syncfs 306 267, sendmmsg 307 269, setns 308 268, process_vm_readv 310 270,
process_vm_writev 311 271, kcmp 312 272, finit_module 313 273, sched_setattr 314 274, seccomp 317 277,
kexec_file_load 320 294, bpf 321 280, userfaultfd 323 282, io_pgetevents 333 292, pidfd_send_signal 424 424,
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, open_tree 428 428,
move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, pidfd_open 434 434,
pidfd_getfd 438 438, process_madvise 440 440, mount_setattr 442 442, quotactl_fd 443 443,
landlock_create_ruleset 444 444, landlock_add_rule 445 445, landlock_restrict_self 446 446,
memfd_secret 447 447, process_mrelease 448 448, set_mempolicy_home_node 450 450
""")
"""Calls that are refused with EPERM: sockets, other processes, priorities, kernel objects, mounts, privileges."""
