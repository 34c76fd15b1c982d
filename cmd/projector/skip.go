package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"os"
	"strings"
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
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(c.URL, "/")+"/v1/sessions/"+url.PathEscape(c.Session)+"/skip", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	b, err := c.send(req)
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(b)
	return err
}
