#!/bin/sh
# Become systemd, process 1 of a machine: in new pid, mount, cgroup, uts, ipc and network namespaces, on ROOT.
#
#   machine_boot.sh ROOT
set -eu
root=$1
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
# What is set below /proc/sys and /sys is the whole kernel's.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 none "$root/dev"
for device in null zero full random urandom tty; do
    : >"$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs -o mode=1777 none "$root/dev/shm"
mount -t tmpfs -o mode=755 none "$root/run"
hostname machine
cd "$root"
pivot_root . mnt
umount -l /mnt
exec setpriv --bounding-set=-sys_time,-sys_module,-sys_rawio,-sys_boot,-syslog \
    env -i container=memory-test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --unit=multi-user.target --log-target=console --show-status=0
