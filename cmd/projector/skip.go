package main

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
)

type quarantineSkipCmd struct {
	urlFlag
	Session string `arg:"" help:"Session id."`
	Reason  string `help:"Why it may stay as it is." required:""`
	By      string `help:"Who decided." env:"USER" required:""`
}

func (c *quarantineSkipCmd) Run(ctx context.Context) error {
	body, err := json.Marshal(map[string]string{"by": c.By, "reason": c.Reason})
	if err != nil {
		return err
	}
	b, err := c.call(ctx, http.MethodPost, sessionPath(c.Session, "/skip"), body)
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(b)
	return err
}
