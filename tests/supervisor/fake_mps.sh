#!/bin/sh
# Stands in for nvidia-cuda-mps-control: -d starts a daemon, standard input gives it a command. FAKE_MPS: fail (does not start),
# mute (starts, answers nothing), stubborn (does not quit).
pipe=$CUDA_MPS_PIPE_DIRECTORY
pidfile=$pipe/nvidia-cuda-mps-control.pid
case $1 in
-d)
    if [ "$FAKE_MPS" = fail ]; then
        echo "no GPU was found"
        exit 3
    fi
    if [ -e "$pipe/quit" ] || [ ! -d "$CUDA_MPS_LOG_DIRECTORY" ]; then
        echo "folders of another daemon"
        exit 4
    fi
    env >"$CUDA_MPS_LOG_DIRECTORY/env"
    /bin/sh "$0" daemon &
    echo $! >"$pidfile"
    ;;
daemon)
    while [ "$FAKE_MPS" = stubborn ] || [ ! -e "$pipe/quit" ]; do
        sleep 0.02
    done
    rm -f "$pidfile"
    ;;
*)
    read -r command
    if [ "$FAKE_MPS" = mute ] || [ -z "$(tr -d '\0' <"/proc/$(cat "$pidfile")/cmdline")" ]; then
        echo "Cannot find MPS control daemon process"
        exit 1
    fi
    if [ "$command" = quit ]; then
        touch "$pipe/quit"
    fi
    ;;
esac
