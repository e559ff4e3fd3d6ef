#!/usr/bin/env bash
# A real SLURM on this machine, for tests.
#
#   cluster.sh start [nodes]   1 node (this host) or 2 (node1, node2), each with 2 fake GPUs
#   cluster.sh stop            cancel all jobs, end the daemons, forget everything
#
# `start` leaves a running cluster of that size alone, and starts again a node that died. It
# installs what is missing. Exit code 77: it cannot run here, and the message says why; tests then
# skip. On GitHub it is 1, and they fail.
# Needs no systemd, cgroups, accounting or GPU.
set -euo pipefail

HOME_DIR=/tmp/finetune-slurm # fixed: /etc/slurm/slurm.conf can lead to one cluster only
CONF=$HOME_DIR/slurm.conf
NODE_CPUS=16 NODE_MB=128000 NODE_GPUS=2 # claimed, not real
CONTROL_PORT=16817 NODE_PORT=16820
export SLURM_CONF=$CONF # daemons look for gres.conf and cgroup.conf beside it

cannot() {
    echo "cluster.sh: $1" >&2
    [ -n "${GITHUB_ACTIONS:-}" ] && exit 1
    exit 77
}

install_slurm() {
    command -v slurmctld slurmd sbatch munged >/dev/null && return
    command -v apt-get >/dev/null || cannot "SLURM is not installed, and this is not Debian or Ubuntu"
    # dpkg would start the packaged services, which know nothing of this cluster
    local policy=/usr/sbin/policy-rc.d made=
    [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy && made=1; }
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge; } \
        >/dev/null || { [ -n "$made" ] && rm -f $policy; cannot "apt-get could not install SLURM"; }
    [ -z "$made" ] || rm -f $policy
}

running() { # PIDFILE PROGRAM
    local pid
    pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] &&
        tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q "$2"
}

node_names() {
    if [ "$1" = 1 ]; then hostname -s; else printf 'node%d\n' $(seq "$1"); fi
}

write_config() { # NODES
    local host nodes port=$NODE_PORT node cgroup=disabled
    host=$(hostname -s)
    nodes=$(node_names "$1" | paste -sd,)
    cat <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$CONTROL_PORT
SlurmUser=root
SlurmdUser=root
# cred_expire is also how long a requeued job waits before it starts again (120 s by default)
AuthInfo=socket=$HOME_DIR/munge/socket,cred_expire=10
StateSaveLocation=$HOME_DIR/state
SlurmdSpoolDir=$HOME_DIR/spool.%n
SlurmctldPidFile=$HOME_DIR/slurmctld.pid
SlurmdPidFile=$HOME_DIR/slurmd.%n.pid
SlurmctldLogFile=$HOME_DIR/slurmctld.log
SlurmdLogFile=$HOME_DIR/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MinJobAge=3600
# short timers
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=100000
KillWait=5
SlurmdTimeout=20
JobRequeue=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# what nodes claim need not be real
SlurmdParameters=config_overrides
CONF
    for node in ${nodes//,/ }; do
        echo "NodeName=$node NodeHostname=$node NodeAddr=127.0.0.1 Port=$port CPUs=$NODE_CPUS" \
            "RealMemory=$NODE_MB Gres=gpu:$NODE_GPUS State=UNKNOWN"
        port=$((port + 1))
    done
    # jobs in `urgent` push those of `gpu` and `scavenge` out: requeued there, cancelled here
    cat <<CONF
PartitionName=cpu Nodes=$nodes MaxTime=1-0 PreemptMode=OFF
PartitionName=gpu Nodes=$nodes MaxTime=1-0 PreemptMode=REQUEUE GraceTime=20
PartitionName=scavenge Nodes=$nodes MaxTime=1-0 PreemptMode=CANCEL GraceTime=20
PartitionName=urgent Nodes=$nodes MaxTime=1-0 PreemptMode=OFF PriorityTier=10
CONF
}

start_munge() {
    local folder=$HOME_DIR/munge
    running "$folder/pid" munged && return
    mkdir -p "$folder"
    [ -s "$folder/key" ] || (umask 077 && head -c 128 /dev/urandom >"$folder/key")
    chown -R munge:munge "$folder" && chmod 711 "$folder"
    setpriv --reuid munge --regid munge --clear-groups munged --force --num-threads=2 \
        --socket="$folder/socket" --key-file="$folder/key" --pid-file="$folder/pid" \
        --log-file="$folder/log" --seed-file="$folder/seed" >/dev/null 2>&1
}

start() { # NODES
    [ "$(id -u)" = 0 ] || cannot "only root can start SLURM's daemons"
    install_slurm
    mkdir -p $HOME_DIR/state
    chmod 755 $HOME_DIR
    if running $HOME_DIR/slurmctld.pid slurmctld && ! write_config "$1" | cmp -s - $CONF; then
        stop
        mkdir -p $HOME_DIR/state
    fi
    write_config "$1" >$CONF
    # plain files for GPUs would leave CUDA_VISIBLE_DEVICES unset
    for ((gpu = 0; gpu < NODE_GPUS; gpu++)); do ln -sfn /dev/null "$HOME_DIR/gpu$gpu"; done
    echo "Name=gpu File=$HOME_DIR/gpu[0-$((NODE_GPUS - 1))]" >$HOME_DIR/gres.conf
    # slurmd loads a cgroup plugin though none is used; before 23.02 it could not be disabled
    if slurmd -V | grep -qE ' (2[0-2])\.'; then cgroup=cgroup/v1; else cgroup=disabled; fi
    echo "CgroupPlugin=$cgroup" >$HOME_DIR/cgroup.conf
    # the plugin takes SLURM_CONF out of its jobs' environment: only the default path is sure
    mkdir -p /etc/slurm
    [ ! -e /etc/slurm/slurm.conf ] || [ -L /etc/slurm/slurm.conf ] ||
        cannot "/etc/slurm/slurm.conf belongs to another cluster"
    ln -sfn $CONF /etc/slurm/slurm.conf
    start_munge
    running $HOME_DIR/slurmctld.pid slurmctld || slurmctld >/dev/null 2>&1
    for node in $(node_names "$1"); do
        mkdir -p "$HOME_DIR/spool.$node"
        running "$HOME_DIR/slurmd.$node.pid" slurmd || slurmd -N "$node" >/dev/null 2>&1
    done
    wait_for_nodes "$1"
}

wait_for_nodes() { # NODES
    for _ in $(seq 300); do
        up=$(sinfo -h -N -p cpu -t idle,mixed,allocated -o %N 2>/dev/null | sort -u | wc -l)
        [ "$up" = "$1" ] && return
        sleep 0.2
    done
    echo "cluster.sh: the nodes are not up after a minute" >&2
    sinfo -R >&2 || true
    tail -n 20 $HOME_DIR/*.log >&2
    exit 1
}

end() { # PIDFILE PROGRAM
    running "$1" "$2" || return 0
    local pid
    pid=$(cat "$1")
    kill "$pid"
    for _ in $(seq 100); do
        running "$1" "$2" || return 0
        [ -d "/proc/$pid" ] || return 0
        sleep 0.1
    done
    kill -KILL "$pid"
}

stop() {
    if running $HOME_DIR/slurmctld.pid slurmctld; then # so that slurmd ends the processes of jobs
        timeout 10 squeue -h -o %A | xargs -r timeout 10 scancel || true
        for _ in $(seq 100); do
            [ -n "$(timeout 10 squeue -h -o %A)" ] || break
            sleep 0.1
        done
    fi
    for daemon in $HOME_DIR/slurmctld.pid $HOME_DIR/slurmd.*.pid; do
        [ ! -e "$daemon" ] || end "$daemon" slurm
    done
    end $HOME_DIR/munge/pid munged
    [ "$(readlink /etc/slurm/slurm.conf || true)" != $CONF ] || rm /etc/slurm/slurm.conf
    rm -rf $HOME_DIR
}

# daemons must not keep open what the caller has open: a lock, a pipe that somebody reads to its end
for descriptor in /proc/$$/fd/*; do
    number=${descriptor##*/}
    [ "$number" -le 2 ] || [ "$number" = 255 ] || eval "exec $number>&-"
done

case "${1:-}" in
start) start "${2:-1}" ;;
stop) stop ;;
*)
    sed -n '4,5s/^# *//p' "$0" >&2
    exit 2
    ;;
esac
