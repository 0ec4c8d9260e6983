#!/bin/sh
# Make SPACE/root, the file system of a machine: this one's, seen through an overlay whose writes go to memory.
#
#   machine_prepare.sh SPACE USER UID PATH...      PATH... are shown in it, read-only, where they are
#
# Runs in a mount namespace of its own with private propagation: nothing of it is seen outside, all of it goes with it.
set -eu
space=$1 user=$2 uid=$3
shift 3
root=$space/root

# Taken before anything covers them.
mkdir -p "$space"
mount -t tmpfs -o mode=755 none "$space"
mkdir "$root" "$space/upper" "$space/work" "$space/shown"
n=0
for path in "$@"; do
    n=$((n + 1))
    mkdir "$space/shown/$n"
    mount --bind "$path" "$space/shown/$n"
    mount -o remount,bind,ro "$space/shown/$n"
done
mount -t overlay overlay -o "lowerdir=/,upperdir=$space/upper,workdir=$space/work" "$root"

# No unit of this machine runs but the few that are needed; none that tidies, sets clocks, kernel or disks.
rm -rf "$root/etc/systemd/system" "$root/etc/fstab" "$root/etc/crypttab"
mkdir -p "$root/etc/systemd/system"
for unit in "$root"/usr/lib/systemd/system/*.target.wants/*; do
    case ${unit##*/} in
        dbus.* | systemd-logind.service | systemd-journald.socket | systemd-journald-dev-log.socket) ;;
        systemd-journald.service | systemd-user-sessions.service) ;;
        *) ln -sf /dev/null "$root/etc/systemd/system/${unit##*/}" ;;
    esac
done
for unit in tmpfiles-setup tmpfiles-setup-dev tmpfiles-clean sysctl journal-flush remount-fs timesyncd; do
    ln -sf /dev/null "$root/etc/systemd/system/systemd-$unit.service"
done
for directory in /usr/lib/systemd/system-generators /usr/lib/systemd/user-generators; do
    mount -t tmpfs -o mode=755 none "$root$directory"
done
# The last program of a systemd that ends unmounts and remounts what it finds: here it must only exit.
mount --bind /bin/true "$root/usr/lib/systemd/systemd-shutdown"

echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
echo "$user:x:$uid:$uid::/home/$user:/bin/sh" >>"$root/etc/passwd"
echo "$user:x:$uid:" >>"$root/etc/group"
echo "$user:!:19000::::::" >>"$root/etc/shadow"
mkdir -p "$root/home/$user" "$root/var/lib/systemd/linger"
chmod 700 "$root/home/$user"
chown "$uid:$uid" "$root/home/$user"

for directory in tmp var/tmp root run var/log; do
    mount -t tmpfs -o mode=755 none "$root/$directory"
done
chmod 1777 "$root/tmp" "$root/var/tmp"
n=0
for path in "$@"; do
    n=$((n + 1))
    mkdir -p "$root$path"
    mount --bind "$space/shown/$n" "$root$path"
    mount -o remount,bind,ro "$root$path"
done
echo prepared
exec sleep 600
