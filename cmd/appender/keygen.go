package main

import (
	"fmt"

	"palimpsest/internal/audit"
)

type keygenCmd struct {
	File string `arg:"" help:"New file for the seed. It is readable for its owner alone, and never written over." type:"path"`
}

// Run prints the public key, which is what verify --trusted-key takes.
func (c *keygenCmd) Run() error {
	public, err := audit.NewKeyFile(c.File)
	if err != nil {
		return err
	}
	_, err = fmt.Println(public)
	return err
}
