//go:build !linux

package main

import "errors"

var errNoDisk = errors.New("-disk: disks are filled on Linux alone")

func mountDisk(string) error   { return errNoDisk }
func unmountDisk(string) error { return errNoDisk }
func fillDisk(string) error    { return errNoDisk }
func freeDisk(string) error    { return errNoDisk }
